"""What pyproject.toml cannot say: a wheel holds conf/ and slurm/ inside the package.

They stay at the top of the repository, where people edit them; ftslurm/submit/assets.py finds them
in either place. An editable install copies nothing.
"""

from collections.abc import Iterator
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CHECKOUT_ONLY = (Path("slurm/cluster"), Path("slurm/setup-venv.sh"))
"""The throwaway cluster of the tests, and what makes the checkout's own environment."""


def assets() -> Iterator[Path]:
    """Configs, templates and site scripts."""
    yield from sorted(Path("conf").rglob("*.yaml"))
    for path in sorted(Path("slurm").rglob("*")):
        if path.is_file() and not any(place in (path, *path.parents) for place in CHECKOUT_ONLY):
            yield path


class BuildWithAssets(build_py):
    """Copies them beside the modules; as source files they are part of an sdist too."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for source in assets():
            target = Path(self.build_lib, "ftslurm", source)
            self.mkpath(str(target.parent))
            self.copy_file(str(source), str(target))

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *map(str, assets())]


setup(cmdclass={"build_py": BuildWithAssets})
