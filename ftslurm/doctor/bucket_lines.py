"""What a bucket's own settings mean for the checkpoints that are copied there. Pure.

Judges what AWS's command line has answered: whether what is overwritten can be had back, whether it
is encrypted, sent with TLS, kept from the public and logged. What may not be asked is not known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from ftslurm.doctor.line import Line, fail, ok, skipped, warn

STORE = "s3"
VERSIONS, ENCRYPTION, POLICY = "get-bucket-versioning", "get-bucket-encryption", "get-bucket-policy"
PUBLIC, LOG = "get-public-access-block", "get-bucket-logging"

_NO_OBJECT = "what `aws` printed is no JSON object"
_ERROR = re.compile(r"An error occurred \((\w+)\)")
_NOT_SET = {
    "ServerSideEncryptionConfigurationNotFoundError",
    "NoSuchBucketPolicy",
    "NoSuchPublicAccessBlockConfiguration",
}
_PLAIN = {
    json.dumps({kind: {"aws:securetransport": value}})
    for kind in ("bool", "boolifexists")
    for value in ("false", False)
}


@dataclass(frozen=True)
class Answered:
    """One question: `facts` empty where nothing is set, None where it was refused, and `why`."""

    facts: Optional[Mapping[str, Any]]
    why: str = ""
    code: str = ""
    """S3's own word for a refusal, e.g. `AccessDenied`; empty: none came from there."""


def read_answer(rc: int, stdout: str, stderr: str) -> Answered:
    """Of `aws s3api ... --output json`, which prints nothing where nothing is set."""
    if rc == 0:
        try:
            found = json.loads(stdout) if stdout.strip() else {}
        except ValueError:
            return Answered(None, _NO_OBJECT)
        return Answered(found) if isinstance(found, dict) else Answered(None, _NO_OBJECT)
    match = _ERROR.search(stderr)
    code = match[1] if match else ""
    if code in _NOT_SET:
        return Answered({})
    said = [line for line in stderr.splitlines() if line.strip()]
    return Answered(None, said[-1].strip() if said else f"`aws` ended with {rc}", code)


def no_bucket(bucket: str, first: Answered) -> Optional[Line]:
    """Instead of all lines, where the first answer shows that there is nobody to ask."""
    if first.code == "NoSuchBucket":
        return fail(STORE, f"there is no bucket `{bucket}`", "name one that is there")
    if first.facts is None and not first.code:
        return skipped(STORE, f"`{bucket}` was not asked: {first.why}")
    return None


def judge_bucket(bucket: str, endpoint: str, answers: Mapping[str, Answered]) -> list[Line]:
    """`endpoint`: e.g. `https://s3.eu-central-1.amazonaws.com`; empty: not known."""
    return [
        _versions(answers[VERSIONS]),
        _encryption(answers[ENCRYPTION]),
        _tls(bucket, endpoint, answers[POLICY]),
        _public(answers[PUBLIC]),
        _access_log(answers[LOG]),
    ]


def _versions(answered: Answered) -> Line:
    name, facts = "s3.versions", answered.facts
    if facts is None:
        return skipped(name, answered.why)
    if facts.get("Status") == "Enabled":
        return ok(name, "versions are kept")
    told = "suspended" if facts.get("Status") else "never enabled"
    todo = "what is overwritten or removed by mistake is gone: enable versioning"
    return warn(name, f"versioning was {told}", todo)


def _encryption(answered: Answered) -> Line:
    name, facts = "s3.encryption", answered.facts
    if facts is None:
        return skipped(name, answered.why)
    rules = (facts.get("ServerSideEncryptionConfiguration") or {}).get("Rules") or []
    kinds = [(rule.get("ApplyServerSideEncryptionByDefault") or {}).get("SSEAlgorithm")
             for rule in rules]  # fmt: skip
    told = ", ".join(str(kind) for kind in kinds if kind)
    if told:
        return ok(name, f"by default with {told}")
    todo = "set a default (AES256 or aws:kms), or see that whoever copies asks for it"
    return warn(name, "the bucket encrypts nothing by default", todo)


def _tls(bucket: str, endpoint: str, answered: Answered) -> Line:
    name = "s3.tls"
    if endpoint.startswith("http://"):
        todo = "checkpoints and keys' signatures go in the clear: have an https endpoint"
        return warn(name, f"`aws` asks {endpoint}, without TLS", todo)
    how = f"`aws` asks {endpoint}" if endpoint else "which endpoint `aws` asks is not known"
    if answered.facts is None:
        return skipped(name, f"{how}; its policy: {answered.why}")
    if _refuses_plain(answered.facts, bucket):
        return ok(name, f"{how}; the bucket's policy refuses what comes without TLS")
    todo = "deny s3:* where aws:SecureTransport is false"
    return warn(name, f"{how}; nothing in the bucket's policy refuses all without TLS", todo)


def _refuses_plain(facts: Mapping[str, Any], bucket: str) -> bool:
    """To everybody, whatever is done with any object, and under no other condition."""
    try:
        policy = json.loads(facts.get("Policy") or "{}")
    except ValueError:
        return False
    found = _listed(policy.get("Statement")) if isinstance(policy, dict) else []
    all_objects = re.compile(rf"\*|arn:[\w-]+:s3:::(\*|{re.escape(bucket)}/?\*)")
    return any(
        isinstance(one, dict)
        and one.get("Effect") == "Deny"
        and one.get("Principal") in ("*", {"AWS": "*"}, {"AWS": ["*"]})
        and any(word in ("s3:*", "*") for word in _listed(one.get("Action")))
        and any(all_objects.fullmatch(str(place)) for place in _listed(one.get("Resource")))
        and _is_of_plain_only(one.get("Condition"))
        for one in found
    )


def _is_of_plain_only(condition: Any) -> bool:
    """Keys in any case; the value may be one of a list."""
    told = json.dumps(condition).lower().replace("[", "").replace("]", "")
    return told in _PLAIN


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]


def _public(answered: Answered) -> Line:
    name, facts = "s3.public", answered.facts
    if facts is None:
        return skipped(name, answered.why)
    found = facts.get("PublicAccessBlockConfiguration") or {}
    keys = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")
    lacks = [key for key in keys if found.get(key) is not True]
    if not lacks:
        return ok(name, "all that would make it public is blocked")
    return warn(name, f"not set: {', '.join(lacks)}", "block public access of the bucket")


def _access_log(answered: Answered) -> Line:
    name, facts = "s3.access_log", answered.facts
    if facts is None:
        return skipped(name, answered.why)
    target = (facts.get("LoggingEnabled") or {}).get("TargetBucket")
    if target:
        return ok(name, f"to bucket {target}")
    todo = "enable it, unless the site's CloudTrail has the bucket's data events"
    return warn(name, "no server access log", todo)
