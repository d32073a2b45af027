"""The command as people type it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tightframe.config.job import parse_job
from tightframe.config.policy import PolicyBlock
from tightframe.config.refusals import BelowPolicyError
from tightframe.errors import JobError
from tightframe.flare.simulation import simulator
from tightframe.rounds.setup import prepare
from tightframe_app import cli
from tightframe_app.jobs import folders, recipes

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def tightframe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command in this process, from a folder."""

    def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["tightframe", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        assert code is None or isinstance(code, int), code
        return subprocess.CompletedProcess(arguments, code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def typed(tmp_path: Path, tightframe: Command) -> Callable[..., tuple[object, str, str]]:
    """``tightframe`` from the test's own folder: exit code, output, errors."""

    def run(*arguments: str) -> tuple[object, str, str]:
        done = tightframe(*arguments, cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr

    return run


POLICIES = ("research", "standard", "strict")
PROGRAM = """
import atexit, sys
from tightframe_app.cli import main
HEAVY = {"torch", "monai", "opacus", "nvflare", "pandas", "matplotlib"} | set(sys.argv.pop().split())
atexit.register(lambda: print("loaded:", *sorted(HEAVY & set(sys.modules)), file=sys.stderr))
main()
"""


@pytest.mark.whole
@pytest.mark.parametrize(
    ("arguments", "code", "said", "nor"),
    [
        (["jobs", "list"], 0, "fedavg_isic", "numpy cryptography tightframe.config.job"),
        (["jobs", "export", "fedxyz"], 2, "fedavg_isic", ""),
        (["--help"], 0, "provisioning", "numpy cryptography pydantic"),
        (["methods"], 0, "fedmr", "numpy cryptography tightframe.config.job"),
        (["methods", "fedmr"], 0, "paper: Fan", "numpy cryptography"),
        (["watch", "--help"], 0, "--once", "numpy cryptography pydantic tightframe.results"),
        (["jobs", "--help"], 0, "export", "numpy pydantic tightframe_app.site.commands"),
        (["site", "--help"], 0, "check", "numpy cryptography pydantic tightframe_app.jobs.commands"),
        (["provisioning", "show"], 0, "local/privacy.json", "numpy cryptography tightframe.config.job"),
        (["explain"], 0, "TF-600 to TF-620", "numpy cryptography tightframe.options"),
        (["explain", "policy"], 0, "policy.require_secure_sum", "numpy cryptography tightframe.options"),
    ],
)
def test_names_are_listed_and_checked_without_what_takes_long_to_load(
    arguments: list[str], code: int, said: str, nor: str, tmp_path: Path
) -> None:
    """In a process of its own: torch takes seconds, the protocol and the schema of jobs a third of one."""
    command = [sys.executable, "-c", PROGRAM, *arguments, nor]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
    assert done.stderr.endswith("loaded:\n"), done.stderr


WALK = """
import sys, typer
from typer.testing import CliRunner
from tightframe_app.cli import app
def helps(group, *words):
    yield [*words, "--help"]
    for name, command in getattr(group, "commands", {}).items():
        yield from helps(command, *words, name)
typed = [line.split() for line in sys.argv[1].split(";")]
typed += [[*words, "--format", "json"] for words in typed if words[0] != "schema"]
typed += helps(typer.main.get_command(app))
for words in typed:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (words, done.output)
    heavy = {"torch", "monai", "opacus", "nvflare", "pandas", "matplotlib", "numpy"} & set(sys.modules)
    assert not heavy, (words, heavy)
print(len(typed))
"""


@pytest.mark.whole
def test_no_list_no_help_and_no_explanation_loads_what_takes_long() -> None:
    shown = (
        "methods;methods fedmr;explain;explain fedmr;explain small_cnn;explain eicu;explain status;"
        "explain TF-612;jobs list;schema;schema --all;provisioning show;"
        "provisioning show policies/strict.json"
    )
    done = subprocess.run([sys.executable, "-c", WALK, shown], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 60, "each command's help is among them"


def test_the_list_of_commands_says_what_each_command_s_own_help_says() -> None:
    """The list is shown without loading any of them."""
    group = typer.main.get_command(cli.app)
    for name, part in cli.PARTS.items():
        own = group.commands[name]  # type: ignore[attr-defined]
        assert own.name == name and " ".join(own.help.split("\n\n")[0].split()) == part.help


@pytest.mark.parametrize(
    ("typed_so_far", "offered"),
    [
        ("tightframe pro", {"provisioning"}),
        ("tightframe jobs export fedmr", {"fedmr_isic", "fedmr_isic_dp"}),
        ("tightframe provisioning show po", {"policies/", *(f"policies/{n}.json" for n in POLICIES)}),
        ("tightframe jobs export --pre", {"--preset"}),
    ],
)
def test_a_shell_completes_names(typed_so_far: str, offered: set[str]) -> None:
    environment = {
        "_TIGHTFRAME_COMPLETE": "complete_bash",
        "COMP_WORDS": typed_so_far,
        "COMP_CWORD": str(len(typed_so_far.split()) - 1),
    }
    done = CliRunner().invoke(cli.app, [], prog_name="tightframe", env=environment)
    assert set(done.stdout.split()) == offered


@pytest.mark.whole
def test_export_writes_what_was_asked_for(tmp_path: Path, tightframe: Command) -> None:
    done = tightframe(
        "jobs", "export", "fedmr_isic", "--preset", "full", "--rounds", "7",
        "--sites", "hospital-a, hospital-b,hospital-c",
        "--set", "method_options.intra_form=official", "--set", "method_options.mu_intra=0.5",
        "-o", "out", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    server = json.loads((tmp_path / "out/app/config/config_fed_server.json").read_text())
    job = server["workflows"][0]["args"]
    assert job["rounds"] == 7 and job["model"] == "efficientnet_b0"
    assert job["sites"] == ["hospital-a", "hospital-b", "hospital-c"]
    assert job["method_options"]["intra_form"] == "official"
    assert (
        json.loads((tmp_path / "out/meta.json").read_text())["resource_spec"]["hospital-b"]["num_of_gpus"]
        == 1
    )
    assert tightframe("jobs", "check", "out", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["jobs", "export", "fedxyz"], "fedmr_isic"),
        (["jobs", "export", "fedmr_isic", "--preset", "huge"], "rehearsal"),
        (["jobs", "export", "fedmr_isic", "--set", "rounds=many"], "TF-101"),
        (["jobs", "export", "fedmr_isic", "--set", "nonsense"], "KEY=VALUE"),
        (["simulate", "nowhere"], "nowhere"),
        (["jobs", "check", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_explained_without_a_traceback(
    arguments: list[str], named: str, tmp_path: Path, tightframe: Command
) -> None:
    done = tightframe(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert named in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_export_says_what_the_job_really_trains(
    tmp_path: Path, typed: Callable[..., tuple[object, str, str]]
) -> None:
    code, output, errors = typed("jobs", "export", "fedmr_isic", "-o", "own")
    assert code == 0 and errors == ""
    assert output.startswith(
        "own: FedMR (manifold reshaping) on Fed-ISIC2019 dermoscopy; rehearsal, 3 rounds, "
    )
    asked = ["--set", "method=fedavg", "--set", "dataset=digits", "--set", "dataset_options.silos=6"]
    code, output, errors = typed("jobs", "export", "fedmr_isic", *asked, "--rounds", "1", "-o", "other")
    assert code == 0
    assert output.startswith(
        "other: FedAvg on scikit-learn's handwritten digits with small_cnn; rehearsal, 1 round, "
    )
    assert "--set job_name=NAME" in output
    assert errors == "dataset is now digits; dropped options of the recipe: dataset_options.image_size\n"
    job = folders.read_job(tmp_path / "other")
    assert job["method_options"] == {} and job["dataset_options"] == {"silos": 6}


@pytest.mark.parametrize(
    ("asked", "norm"),
    [
        (["fedmr_isic"], 100.0),
        (["fedmr_isic_dp"], 1000.0),  # noise makes updates long
        (["fedmr_isic", "--set", "update_norm=7"], 7.0),
        (["fedmr_isic", "--set", "update_norm=null"], None),
        (["fedilc_eicu"], 100.0),
        (["fedilc_eicu", "--set", "method_options.variant=inter_geo"], None),  # split by sign: no norm
        (["--method", "local_only", "--data", "fed_isic2019"], None),
    ],
)
def test_an_exported_job_has_the_norm_that_production_requires(
    asked: list[str], norm: float | None, tmp_path: Path, typed: Callable[..., tuple[object, str, str]]
) -> None:
    assert typed("jobs", "export", *asked, "-o", "job")[0] == 0
    job = parse_job(folders.read_job(tmp_path / "job"))
    assert job.update_norm == norm
    policy = PolicyBlock(required_privacy=False, allow_sign_split=True).resolve(production=True)
    setup = prepare(job, policy.ceilings)
    if "update_norm=null" in asked:
        with pytest.raises(BelowPolicyError, match="max_update_norm"):
            policy.check_method(setup.setting.config, job)
    else:
        policy.check_method(setup.setting.config, job)


def test_check_finds_a_changed_job_and_restores_the_allow_list(tmp_path: Path, tightframe: Command) -> None:
    for recipe in recipes.RECIPES:
        files = folders.committed_files(recipe.job())
        folders.write_job(files, tmp_path / "jobs" / recipe.name)
    for name in ("fedmr_isic", "fedavg_isic"):
        assert tightframe("jobs", "export", name, "--committed", cwd=tmp_path).returncode == 0
    assert tightframe("jobs", "check", cwd=tmp_path).returncode == 0
    allowed = json.loads((tmp_path / "simulator_workspace/local/resources.json").read_text())
    assert allowed["class_allow_list"] == [
        "tightframe.flare.controller.FederationController",
        "tightframe.flare.executor.SiloExecutor",
    ]
    path = tmp_path / "jobs/fedmr_isic/app/config/config_fed_client.json"
    path.write_text(path.read_text().replace("fedmr", "fedavg"))
    done = tightframe("jobs", "check", cwd=tmp_path)
    assert done.returncode == 1 and "config_fed_client.json differs" in done.stderr


def test_the_committed_allow_list_is_the_simulators_own(
    root: Path, tmp_path: Path, tightframe: Command
) -> None:
    committed = root / "simulator_workspace" / "local" / "resources.json"
    assert committed.read_text() == simulator.allow_list_text()
    for recipe in recipes.RECIPES:
        folders.write_job(folders.job_files(recipe.job()), tmp_path / "jobs" / recipe.name)
    wide = tmp_path / "simulator_workspace" / "local" / "resources.json"
    wide.parent.mkdir(parents=True)
    wide.write_text(committed.read_text().replace("flare.executor.SiloExecutor", ""))
    done = tightframe("jobs", "check", cwd=tmp_path)
    assert done.returncode == 1 and "is not the allow list" in done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "job"
    folders.write_job(folders.job_files(recipes.get("fedmr_isic").job(sites=["a", "b", "c"])), path)
    return path


def _edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values, indent=2) + "\n")


def test_check_of_a_folder_takes_values_and_gpus_from_it(folder: Path) -> None:
    assert folders.check_folder(folder) == []
    job = recipes.get("fedmr_isic").job("full", sites=["a", "b", "c"], changes={"rounds": 3})
    folders.write_job(folders.job_files(job, gpus=2, gpu_memory=40), folder)
    assert folders.check_folder(folder) == []


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        (
            "app/config/config_fed_client.json",
            lambda v: v["executors"][0]["executor"]["args"].update(rounds=5),
            "config_fed_client.json differs",
        ),
        (
            "app/config/config_fed_client.json",
            lambda v: v["executors"][0]["executor"].update(path="os.system"),
            "config_fed_client.json differs",
        ),
        (
            "app/config/config_fed_server.json",
            lambda v: v["components"].append({"id": "x", "path": "nvflare.a.B"}),
            "config_fed_server.json differs",
        ),
        ("meta.json", lambda v: v["deploy_map"].update(app=["server", "a"]), "meta.json differs"),
        (
            "meta.json",
            lambda v: v.update(resource_spec={"a": {"num_of_gpus": 1, "mem_per_gpu_in_GiB": 8}}),
            "meta.json differs",
        ),
    ],
)
def test_check_of_a_folder_reads_every_file(
    folder: Path, name: str, change: Callable[[dict[str, Any]], object], problem: str
) -> None:
    _edit(folder / name, change)
    (found,) = folders.check_folder(folder)
    assert problem in found


def test_a_folder_that_does_not_fit_its_job_fails_the_check(folder: Path, tightframe: Command) -> None:
    (folder / "meta.json").write_text("{}")
    done = tightframe("jobs", "check", "job", cwd=folder.parent)
    assert done.returncode == 1 and "meta.json differs" in done.stderr
    assert "valid" not in done.stdout


@pytest.mark.parametrize("stranger", ["app/custom/x.py", "app/custom/", "app/config/log_config.json", "link"])
def test_check_of_a_folder_refuses_strangers(folder: Path, stranger: str) -> None:
    path = folder / stranger
    if stranger == "link":
        path.symlink_to(folder.parent)
    elif stranger.endswith("/"):
        path.mkdir()
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    (problem, *_) = [found for found in folders.check_folder(folder) if stranger.rstrip("/") in found]
    assert "does not belong" in problem
    (folder / "meta.json").unlink()
    assert any("meta.json is missing" in found for found in folders.check_folder(folder))


def test_check_of_a_folder_validates_the_job_itself(folder: Path) -> None:
    path = folder / "app/config/config_fed_server.json"
    _edit(path, lambda v: v["workflows"][0]["args"]["method_options"].update(mu_intra=-1))
    with pytest.raises(JobError, match=r"method_options\.mu_intra"):
        folders.check_folder(folder)


@pytest.mark.parametrize(
    "text", ["not json", "[]", '{"workflows": 3}', '{"workflows": [{"path": "nvflare.x.Y"}]}', b"\xff"]
)
def test_a_folder_that_is_no_job_of_ours_is_a_named_error(folder: Path, text: str | bytes) -> None:
    content = text if isinstance(text, bytes) else text.encode()
    (folder / "app/config/config_fed_server.json").write_bytes(content)
    with pytest.raises(JobError):
        folders.read_job(folder)


@pytest.mark.parametrize("name", ["data [old]", "[", ":smile:", "[bold"])
def test_what_users_write_is_no_markup(
    name: str, tmp_path: Path, typed: Callable[..., tuple[object, str, str]]
) -> None:
    """Folders of brackets in every message; `[/x]` is an error where markup is read."""
    folder = f"{name}/[/x]"
    code, output, errors = typed("jobs", "export", "fedmr_isic", "-o", folder)
    assert code == 0 and output.startswith(f"{folder}: FedMR"), errors
    assert f"simulate '{folder}'" in output, "can be pasted into a shell"
    code, output, _ = typed("jobs", "check", folder)
    assert code == 0 and output.startswith(f"{folder}: valid\n{folder}: a task moves up to ")
    (tmp_path / folder / "[red]stranger").write_text("")
    code, _, errors = typed("jobs", "check", folder)
    assert code == 1 and f"{folder}/[red]stranger does not belong" in errors
    for arguments in (["simulate", f"{name}/[/y]"], ["jobs", "check", f"{name}/[/y]"]):
        code, _, errors = typed(*arguments)
        assert code == 2 and f"error: TF-106: Expected a job folder at {name}/[/y], but" in errors
    code, _, errors = typed("simulate", folder, "-s", f"{name}[/z].json")
    assert code == 2 and f"{name}[/z].json" in errors
    assert typed("jobs", "export", "[/x]")[0] == 2


@pytest.mark.parametrize("kind", [ValueError, KeyError, TypeError])
def test_a_bug_is_not_taken_for_a_mistake(
    kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(folder: Path) -> None:
        raise kind("a bug")

    monkeypatch.setattr(folders, "read_job", broken)
    monkeypatch.setattr(sys, "argv", ["tightframe", "simulate", str(tmp_path)])
    with pytest.raises(kind, match="a bug"):
        cli.main()


def test_simulate_checks_the_site_file_before_anything_runs(tmp_path: Path, tightframe: Command) -> None:
    tightframe("jobs", "export", "fedmr_isic", "-o", "job", cwd=tmp_path)
    (tmp_path / "sites.json").write_text(json.dumps({"sites": {"site-1": {"dta": {}}}}))
    done = tightframe("simulate", "job", "-s", "sites.json", cwd=tmp_path)
    assert done.returncode == 2 and "sites.site-1.dta" in done.stderr
    assert not (tmp_path / "simulator_workspace").exists()


def test_a_full_disk_is_an_error_of_one_line_and_no_bug(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def fill() -> None:
        with open("/dev/full", "wb", buffering=0) as stream:
            stream.write(b"0")

    monkeypatch.setattr(cli, "app", fill)
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert capsys.readouterr().err == "error: No space left on device\n"
    monkeypatch.setattr(cli, "app", lambda: os.kill(2**22 + 1, 0))
    with pytest.raises(ProcessLookupError):
        cli.main()


def test_export_refuses_a_file_and_an_empty_list_of_sites(tmp_path: Path, tightframe: Command) -> None:
    (tmp_path / "README.md").write_text("mine")
    done = tightframe("jobs", "export", "fedmr_isic", "-o", "README.md", cwd=tmp_path)
    assert done.returncode == 2 and "is a file" in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "README.md").read_text() == "mine"
    done = tightframe("jobs", "export", "fedmr_isic", "--sites", "", cwd=tmp_path)
    assert done.returncode == 2 and "silo names" in done.stderr + done.stdout


def test_export_replaces_an_earlier_export_of_the_same_job_only(
    tmp_path: Path, typed: Callable[..., tuple[object, str, str]]
) -> None:
    meta = tmp_path / "job" / "meta.json"
    assert typed("jobs", "export", "fedmr_isic", "-o", "job")[0] == 0
    before = meta.read_bytes()
    for other in (["fedetf_isic"], ["fedmr_isic", "--set", "job_name=study"]):
        code, _, errors = typed("jobs", "export", *other, "-o", "job")
        assert code == 2 and "the job 'fedmr_isic', not" in errors and "--output" in errors
        assert meta.read_bytes() == before
    assert typed("jobs", "export", "fedmr_isic", "--sites", "a,b,c", "-o", "job")[0] == 0
    assert json.loads(meta.read_text())["deploy_map"] == {"app": ["server", "a", "b", "c"]}
    # Files of these names need not be an export: somebody else's job, or half of one.
    server = tmp_path / "job" / "app" / folders.SERVER_FILE
    server.write_text(json.dumps({"workflows": []}))
    code, _, errors = typed("jobs", "export", "fedmr_isic", "-o", "job")
    assert code == 2 and "no complete job export" in errors and server.is_file()


def test_export_says_what_it_replaced(tmp_path: Path, typed: Callable[..., tuple[object, str, str]]) -> None:
    export = ("jobs", "export", "fedmr_isic", "-o", "job")
    assert typed(*export, "--rounds", "7", "--set", "training.epochs=2")[2] == ""
    assert typed(*export, "--rounds", "7", "--set", "training.epochs=2")[2] == "", "nothing is lost"
    code, _, errors = typed(*export, "--seed", "5")
    assert code == 0
    assert errors == (
        "replaced the earlier export in job: rounds was 7, is 3; seed was 2019, is 5; "
        "training.epochs was 2, is 4\n"
    )
    assert typed(*export, "--seed", "5", "--gpus", "1")[2].endswith("other resources or another checkpoint\n")
    assert not (tmp_path / "job.before").exists()


@pytest.mark.whole
def test_what_export_did_not_write_is_refused_and_with_force_kept(
    tmp_path: Path, typed: Callable[..., tuple[object, str, str]]
) -> None:
    def files(folder: str) -> dict[str, bytes]:
        root = tmp_path / folder
        return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}

    def notes(folder: Path) -> None:
        (folder / "notes.txt").write_text("mine")

    def client(folder: Path) -> None:
        path = folder / "app/config/config_fed_client.json"
        _edit(path, lambda values: values.update(submit_task_result_timeout=900))

    def old(folder: Path) -> None:
        path = folder / f"app/{folders.SERVER_FILE}"
        _edit(path, lambda values: values["workflows"][0]["args"].update(gone="with an earlier version"))

    asked = ["jobs", "export", "fedmr_isic"]
    cases: list[tuple[str, list[str], Callable[[Path], None] | None, str]] = [
        ("method", [*asked, "--set", "method=fedavg"], None, "with the method 'fedmr', not 'fedavg'"),
        ("data", [*asked, "--set", "dataset=mnist"], None, "with the dataset 'fed_isic2019', not 'mnist'"),
        ("name", ["jobs", "export", "fedetf_isic"], None, "the job 'fedmr_isic', not 'fedetf_isic'"),
        ("notes", asked, notes, "also holds ['notes.txt']"),
        ("client", asked, client, "edited, or written by another version"),
        ("old", asked, old, "edited, or written by another version"),
    ]
    for folder, command, change, named in cases:
        assert typed(*asked, "-o", folder)[0] == 0
        if change is not None:
            change(tmp_path / folder)
        before = files(folder)
        code, _, errors = typed(*command, "-o", folder)
        assert code == 2 and "TF-102" in errors and named in errors and "--force" in errors, errors
        assert files(folder) == before and not (tmp_path / f"{folder}.before").exists()
        code, _, errors = typed(*command, "-o", folder, "--force")
        assert code == 0 and named in errors and f"{folder}.before" in errors, errors
        assert files(f"{folder}.before") == before and files(folder) != before
        assert typed("jobs", "check", folder)[0] == 0
    notes(tmp_path / "notes")
    before = files("notes")
    code, _, errors = typed(*asked, "-o", "notes", "--force")
    assert code == 2 and "that exists already" in errors and files("notes") == before
    with pytest.MonkeyPatch.context() as patch:  # the folder that the command runs in cannot be replaced
        patch.chdir(tmp_path / "notes")
        for output in (".", "..", str(tmp_path / "notes")):
            code, _, errors = typed(*asked, "-o", output, "--force")
            assert code == 2 and "Nothing was written" in errors and files("notes") == before, errors
    (tmp_path / "link").symlink_to(tmp_path / "method")
    before = files("method")
    assert typed(*asked, "-o", "link")[0] == 2 and typed(*asked, "-o", "link", "--force")[0] == 0
    assert files("method") == before and (tmp_path / "link.before").is_symlink()


def test_a_committed_folder_is_written_anew_without_a_word(
    tmp_path: Path, typed: Callable[..., tuple[object, str, str]]
) -> None:
    """Its recipe may have changed in any way since; but what is nobody's recipe stays."""
    other = recipes.get("fedmr_isic").job(changes={"method": "fedavg", "rounds": 9})
    folders.write_job(folders.job_files(other), tmp_path / "jobs/fedmr_isic")
    code, _, errors = typed("jobs", "export", "fedmr_isic", "--committed")
    assert (code, errors) == (0, "")
    assert folders.read_job(tmp_path / "jobs/fedmr_isic")["method"] == "fedmr"
    (tmp_path / "jobs/fedmr_isic/notes.txt").write_text("mine")
    assert typed("jobs", "export", "fedmr_isic", "--committed")[0] == 2
