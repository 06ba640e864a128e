"""The page is one file, shows the figures of --json, and nothing a user has named gets out."""

import json
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from chromium import browse
from report_fleets import job as failed_job
from report_fleets import long_runs, ordinary_jobs
from test_job_table import row
from test_report_command import PREEMPTED_THEN_DONE, report, sacct
from test_report_sources import make_run

from ftslurm.cli import main
from ftslurm.diagnosis import causes
from ftslurm.report import joined
from ftslurm.report.drains import drains
from ftslurm.report.fleet import Fleet, Goodput
from ftslurm.report.jobs import SweepTask
from ftslurm.report.page import page
from ftslurm.report.page_charts import NodeFailures, nodes_over_time, value_at
from ftslurm.report.records import fleet_record, job_record
from ftslurm.report.sweeps import SweepReport, sweep_record
from ftslurm.report.text import hours, percent
from ftslurm.scheduler.hostlist import expand
from ftslurm.scheduler.node_events import NodeEvent

__all__ = ["sacct"]

EVIL = "</script><script>alert(1)</script>&\"'<b>"
BEGIN_AT = 1_788_000_000.0
VOID = {"meta"}

# Run in the page: what a person sees of it, as JSON in its title.
LOOK = """<script>
const box = one => one.getBoundingClientRect();
const seen = {
  figures: [...document.querySelectorAll('[data-of]')].map(one => [one.dataset.of, one.innerText]),
  bars: [...document.querySelectorAll('.row')].map(row => {
    const track = box(row.querySelector('.track'));
    return [row.querySelector('.of').innerText, row.querySelector('.at').innerText,
      [...row.querySelectorAll('.track i')].map(
        bar => [(box(bar).left - track.left) / track.width, box(bar).width / track.width])];
  }),
  table_past: Math.max(...[...document.querySelectorAll('.scroll')].map(
    one => one.scrollWidth - one.clientWidth)),
  past_the_edge: document.scrollingElement.scrollWidth - window.innerWidth,
  cut: [...document.querySelectorAll('.at, .tile, li, p, .ticks span')].filter(
    one => one.scrollWidth > one.clientWidth + 1 && one.clientWidth).map(one => one.innerText),
  overlapping: [...document.querySelectorAll('.ticks')].flatMap(ticks => {
    const shown = [...ticks.children].filter(one => box(one).width).map(box);
    return shown.slice(1).filter((one, i) => one.left < shown[i].right + 4);
  }).length,
  ink: getComputedStyle(document.body).color,
  ground: getComputedStyle(document.body).backgroundColor,
};
const told = encodeURIComponent(JSON.stringify(seen));
if (parent === window) document.write('<pre id=seen>' + told + '</pre>');
else parent.postMessage(told, '*');
</script>"""


class Figures(HTMLParser):
    """What stands in the elements that name a value of the JSON."""

    def __init__(self, text):
        super().__init__()
        self.found, self.open, self.sections = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append((tag, dict(attrs).get("data-of")))

    def handle_endtag(self, tag):
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        tag, path = self.open[-1] if self.open else ("", None)
        if path:
            self.found.append((path, data))
        if tag == "h2":
            self.sections.append(data)


def page_of(sacct, *rows):
    sacct.rows(*rows)
    code = report("--html", "report.html")
    return code, (sacct.folder / "report.html").read_text()


def embedded(text):
    found = re.search(r"<script type='application/json' id=data>(.*?)</script>", text, re.DOTALL)
    return json.loads(found[1])


def event(node, lasting_h, reason):
    return NodeEvent(node, BEGIN_AT, BEGIN_AT + 3600.0 * lasting_h, "DOWN", "root", reason)


def made_page(*jobs, goodput=None, sweeps=()):
    fleet, failures = Fleet(), NodeFailures()
    for one in jobs:
        fleet.add(one, expand=expand)
        failures.add(one)
    fleet.goodput = goodput or fleet.goodput
    out = [event("gpu3", 2.0, "ftslurm:XID79 gpu3 boot=ab"), event("gpu4", 1.0, "Not responding")]
    fleet.drains = drains(out if jobs else [], since=None, until=None, now=BEGIN_AT + 9000.0)
    data = {"schema_version": 1, "since": "now-20days", "until": "now",
            "source": {"accounting": "sacct", "notes": []}, "fleet": fleet_record(fleet),
            "jobs": [job_record(one) for one in jobs],
            "sweeps": [sweep_record(one) for one in sweeps]}  # fmt: skip
    period = (BEGIN_AT, BEGIN_AT + 20 * 86_400.0)
    return page(jobs, failures, data, title="ftslurm report: all users", period=period, left=0)


def busy_page():
    jobs = [*ordinary_jobs(3, jobs=300, begin_at=BEGIN_AT), *long_runs(1, begin_at=BEGIN_AT)]
    first = jobs[-1].attempts[0]
    first.cause = first.cause or "code"
    jobs[-1].name, first.node = "one_word_" * 20, "a-node-with-a-long-name-" * 3
    return made_page(*jobs, goodput=Goodput(8e7, 1.5e6, 2.1e6, 6e6, 1e5, 3e6))


def shown(path, value):
    if path.endswith("share"):
        return percent(value)
    if ".goodput." in path:
        return f"{hours(value / 3600.0)} node-hours"
    return hours(value) if path.endswith(("hours", "mtbf_h")) else f"{value:,}"


def check_figures(found, data):
    """Each as --json has it, and those that matter most among them."""
    assert {path: text for path, text in found} == {
        path: shown(path, value_at(data, path)) for path, _ in found
    }
    wanted = {"fleet.jobs", "fleet.total.failures", "fleet.total.gpu_hours"}
    wanted |= {f"fleet.by.cause.{cause}.attempts" for cause in data["fleet"]["by"]["cause"]}
    if data["fleet"]["goodput"]["share"] is not None:
        wanted |= {f"fleet.goodput.{name}_s" for name in ("trained", "lost", "stall", "restart")}
    assert wanted <= {path for path, _ in found}


def seen_in_chromium(tmp_path, text, *options, frame_width=0):
    """Whole windows have no less than 500 pixels; a frame may."""
    path, framed = tmp_path / "looked_at.html", tmp_path / "framed.html"
    path.write_text(text.replace("</html>", LOOK + "</html>"))
    framed.write_text(
        f"<iframe src={path.name} style='width:{frame_width}px;height:3000px;border:0'></iframe>"
        "<pre id=seen></pre><script>addEventListener('message', told => {"
        "document.getElementById('seen').textContent = told.data})</script>"
    )
    words = ["--dump-dom", "--virtual-time-budget=5000", *options]
    dom = browse(framed if frame_width else path, *words)
    return json.loads(unquote(re.search(r"<pre id=\"seen\">(.*?)</pre>", dom)[1]))


def test_the_page_shows_the_figures_of_json(sacct, capsys):
    code, text = page_of(sacct, *PREEMPTED_THEN_DONE, row("8", "FAILED", ExitCode="3:0"))
    assert code == 1
    capsys.readouterr()
    main(["report", "--json"])
    record = json.loads(capsys.readouterr().out)
    assert embedded(text)["fleet"] == record["fleet"]
    assert sorted(job["job_id"] for job in embedded(text)["jobs"]) == ["7", "8"]
    check_figures(Figures(text).found, record)
    assert "a node failed" in text  # of an attempt's bar


def test_every_drawing_is_there_and_every_figure_is_that_of_the_data():
    text = busy_page()
    told = Figures(text)
    assert told.sections == [
        "What to change, the dearest first", "Where the time of the nodes went",
        "Why attempts ended", "Attempts over time", "Nodes and failures over time",
        "Nodes out of service", "Jobs",
    ]  # fmt: skip
    check_figures(told.found, embedded(text))
    assert told.open == [] or {tag for tag, _ in told.open} <= {"html"}


@pytest.mark.timeout(300)  # the browser is fetched once
def test_a_browser_shows_the_figures_of_json_and_bars_as_long_as_they_say(tmp_path):
    text = busy_page()
    data = embedded(text)
    seen = seen_in_chromium(tmp_path, text)
    check_figures([tuple(one) for one in seen["figures"]], data)
    bars = {what: (told, spans) for what, told, spans in seen["bars"]}
    good = data["fleet"]["goodput"]
    parts = ("trained", "lost", "stall", "restart", "other")
    allocated_s = sum(good[f"{name}_s"] for name in parts)
    begin = 1.0
    for what, name in (("starting", "restart"), ("stopped for saves", "stall"),
                       ("trained again or lost", "lost")):  # fmt: skip
        share = good[f"{name}_s"] / allocated_s
        begin -= share
        assert bars[what][1] == [pytest.approx([begin, share], abs=0.005)]
    assert bars["training that lasts"][1] == [pytest.approx([0.0, good["share"]], abs=0.005)]
    assert bars["drained by ftslurm"] == ("2 node-hours, 1 time", [pytest.approx([0.0, 1.0])])
    assert bars["lost, Slurm had no answer"][1] == [pytest.approx([0.0, 0.5], abs=0.005)]
    causes = data["fleet"]["by"]["cause"]
    most = max(group["attempts"] for group in causes.values())
    for cause, group in causes.items():
        assert bars[cause][1][0][1] == pytest.approx(group["attempts"] / most, abs=0.005)
    for job in data["jobs"]:
        told, spans = bars.get(f"{job['job_id']} {job['name']}", (None, None))
        if told is not None:
            assert told.startswith(f"{len(job['attempts'])} attempt")
            assert len(spans) == len(job["attempts"])
    on_node = [one for job in data["jobs"] for one in job["attempts"]
               if one["cause"] and "gpu3" in one["nodes"].split(",")]  # fmt: skip
    free = ("preempted", "time_limit", "cancelled_user")
    failed = [one for one in on_node if one["cause"] not in free]
    blamed = [one for one in failed if one["node"] == "gpu3"]
    assert bars["gpu3"][0] == f"{len(failed)} failed, {len(blamed)} blamed on it"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("width", [400, 1100])
def test_nothing_is_cut_off_on_a_wide_screen_or_a_narrow_one(tmp_path, width):
    seen = seen_in_chromium(tmp_path, busy_page(), frame_width=width)
    assert seen["past_the_edge"] <= 0
    assert seen["cut"] == []
    assert seen["overlapping"] == 0
    # On a narrow one the table is moved to and fro below the finger.
    assert (seen["table_past"] > 0) is (width == 400)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_dark", [True, False])
def test_by_day_and_by_night_the_page_can_be_read(tmp_path, is_dark):
    scheme = f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"
    seen = seen_in_chromium(tmp_path, made_page(*long_runs(1, runs=1)), scheme)
    ink, ground = (brightness(seen[name]) for name in ("ink", "ground"))
    assert (ink > ground) is is_dark
    assert abs(ink - ground) > 0.6


def brightness(colour):
    """0 to 1, of `rgb(18, 24, 31)`."""
    red, green, blue = map(int, re.findall(r"\d+", colour)[:3])
    return (0.299 * red + 0.587 * green + 0.114 * blue) / 255


def test_sweeps_are_listed_with_what_failed_and_what_came_out():
    sweep = SweepReport("/runs/sweep-<1>", 5)
    for number, state, value in ((0, "completed", 0.5), (1, "completed", 2.5), (2, "failed", None),
                                 (3, "failed", None)):  # fmt: skip
        sweep.add(SweepTask("/runs/sweep-<1>", number, [f"lr={number}"], value), state)
    text = made_page(*long_runs(1, runs=1), sweeps=[sweep])
    assert "Sweeps" in Figures(text).sections
    cells = re.search(r"<td>sweep-&lt;1&gt;</td>.*?</tr>", text)[0]
    assert re.findall(r">([^<>]+)</td>", cells) == [
        "sweep-&lt;1&gt;", "5", "2 completed, 2 failed", "2-3", "0.5 of task 0 (lr=0)",
        "2.5 of task 1 (lr=1)",
    ]  # fmt: skip


def test_each_cause_is_explained_to_who_does_not_know_the_word():
    text = busy_page()
    for why in ("ranks lost each other though all of them lived; it may pass (the cluster&#x27;s",
                "the nodes were given to another job (nobody&#x27;s fault)"):  # fmt: skip
        assert f"<span class=why>{why}" in text
    assert made_page(*ordinary_jobs(1, jobs=1)).count("<b data-of='fleet.jobs'>1</b><span>job<")


def test_a_loss_that_nobody_knows_is_explained_below_the_table():
    assert "?: cut short without a record" in busy_page()
    assert "?: cut short" not in made_page(*long_runs(1, runs=1))


def test_a_page_of_nothing_says_so():
    told = Figures(made_page())
    assert (told.found, told.sections) == ([], [])
    assert "There were no jobs." in made_page()


def test_nothing_is_fetched_and_nothing_runs(sacct):
    _, text = page_of(sacct, *PREEMPTED_THEN_DONE)
    assert not re.search(r"https?:|src=|<link|@import|url\(", text)
    assert text.count("<script") == 1
    assert "id=data" in text


def test_names_of_jobs_are_text_and_nothing_else(sacct):
    rows = [row("7", "FAILED", ExitCode="3:0", name=EVIL, User="<i>x</i>", NodeList="n'\"><u>")]
    _, text = page_of(sacct, *rows)
    assert text.count("<script") == 1
    assert "<b>&" not in text
    assert not re.search(r"<i>|<u>|alert\(1\)</script", text.partition("<script")[0])
    assert embedded(text)["jobs"][0]["name"] == EVIL


def test_a_page_of_many_jobs_keeps_those_that_failed(sacct):
    rows = [row(str(n), "FAILED" if n == 1 else "COMPLETED", ExitCode="3:0") for n in range(1500)]
    _, text = page_of(sacct, *rows)
    found = embedded(text)
    assert found["fleet"]["jobs"] == 1500
    assert "1" in {job["job_id"] for job in found["jobs"]}
    assert len(found["jobs"]) <= 1001
    assert "more, which --json and --csv list" in text


def test_of_jobs_that_failed_as_often_the_dearest_are_drawn_and_listed_first():
    jobs = [failed_job(number, "ada", f"try-{number}", "gpu", ["n1"], cause=causes.CODE,
                at=BEGIN_AT + 60.0 * number, hours=5.0 if number == 70 else 0.01)
            for number in range(80)]  # fmt: skip
    text = made_page(*jobs)
    drawn, listed = text.partition("<h2>Attempts over time")[2].partition("<h2>Jobs")[::2]
    assert drawn.index("70 try-70") < drawn.index("0 try-0<")
    assert listed.index("try-70<") < listed.index("try-0<")


def test_failures_of_jobs_that_are_not_listed_are_among_those_of_the_nodes(sacct):
    rows = [row(str(n), "FAILED", ExitCode="3:0", NodeList="n1") for n in range(1500)]
    _, text = page_of(sacct, *rows)
    assert len(embedded(text)["jobs"]) <= 1001
    assert "1,500 failed, 0 blamed on it" in text


def test_what_was_named_is_the_title(sacct):
    sacct.rows(*PREEMPTED_THEN_DONE)
    assert report("7", "--html", "report.html") == 1
    text = Path("report.html").read_text()
    assert "<h1>ftslurm report: 7</h1>" in text
    assert "Whole, whenever it ran" in text


def test_a_page_for_a_folder_that_is_not_there_is_refused_before_anything_is_read(sacct, capsys):
    assert report("--html", "no/such/report.html") == 2
    assert "there is no folder `no/such`" in capsys.readouterr().err
    assert report("--html", ".") == 2
    assert "`.` is a folder; name a file in it" in capsys.readouterr().err
    assert not (sacct.folder / "asked").exists()


def test_a_character_that_no_file_can_hold_does_not_keep_the_page_from_being_written(
    sacct, monkeypatch
):
    """Half of a pair of UTF-16, which JSON may hold."""
    make_run("r", "7", claimed_at=time.time() - 600.0)
    text = "value \ud800"
    ending_of = joined.ending_of
    monkeypatch.setattr(
        joined, "ending_of", lambda *told, **more: replace(ending_of(*told, **more), sentence=text)
    )
    assert report("r", "--html", "report.html") == 0
    assert "value ?" in (sacct.folder / "report.html").read_text()


def test_a_failure_whose_start_is_lost_is_within_the_drawing():
    lost = next(iter(long_runs(1, runs=1, begin_at=BEGIN_AT)))
    first = lost.attempts[0]
    first.cause, first.start_at, first.end_at = "node", None, BEGIN_AT - 20 * 86_400.0
    failures = NodeFailures()
    failures.add(lost)
    assert failures.span[0] == first.end_at
    assert not re.search(r"left:-", nodes_over_time(failures))
