"""The layout rules that no linter knows."""

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = re.compile(r"^(?:MAX|MIN)_\w+(?:: \w+)? = (?:\(\n(?:.*\n)*?\)|.*)", re.MULTILINE)
SOURCE_ROOTS = ("proto", "daemon", "client", "cuda", "docker")


def test_no_top_level_folder_is_a_package_that_would_hide_another() -> None:
    assert [name for name in SOURCE_ROOTS if (ROOT / name / "__init__.py").exists()] == []


def written_files() -> list[Path]:
    """Python that somebody wrote, not a generator."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listed.stdout.split() if "_pb2" not in name]
    return [file for file in files if file.exists()]


def test_no_source_file_is_longer_than_400_lines() -> None:
    assert [str(file) for file in written_files() if len(file.read_text().splitlines()) > 400] == []


def test_no_function_is_longer_than_50_lines() -> None:
    too_long = [
        f"{file.relative_to(ROOT)}: {node.name}"
        for file in written_files()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= 50
    ]
    assert too_long == []


def test_a_client_install_needs_only_grpcio_protobuf_and_numpy() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = sorted(requirement.split(">")[0] for requirement in project["dependencies"])
    assert names == ["grpcio", "numpy", "protobuf"]


def test_every_limit_says_its_unit_or_its_reason() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listed.stdout.split() if not name.startswith("tests/")]
    bare = [
        f"{file.relative_to(ROOT)}: {limit[0].splitlines()[0]}"
        for file in files
        if file.exists()
        for limit in LIMIT.finditer(file.read_text())
        if "#" not in limit[0]
    ]
    assert bare == []


def test_the_kernels_who_import_none_of_ours_share_our_vocabulary() -> None:
    from kvd import policy, spec
    from kvd_cuda import plan, queries
    from kvd_daemon.engine import kernel_jobs

    assert queries.QUERY_DTYPES == spec.QUERY_DTYPES
    assert plan.MAX_KERNEL == policy.MAX_KERNEL
    assert tuple(kernel_jobs.ROPE_STYLES) == policy.ROPE_STYLES
    assert set(kernel_jobs.ROPE_STYLES.values()) == set(plan.ROPE_STYLES)
