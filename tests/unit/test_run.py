"""``python -m torchdebug_magics run``: a script runs as ever, alone and in the ranks of torchrun, and one report comes of it."""

from __future__ import annotations

import json
import signal
import socket
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from tests import children

pytestmark = pytest.mark.waits

RUN = (sys.executable, "-m", "torchdebug_magics", "run", "nanhunt")
NOT_WATCHED = "nanhunt: the script did not import torch: nothing was watched\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of scripts, and one for temporary files, in which nothing is left."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def written(name: str, text: str) -> Path:
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def ended(*command: str, **environment: str) -> children.Ended:
    return children.run(*command, limit_s=100, **environment)


def left() -> list[str]:
    return [path.name for path in Path("tmp").iterdir() if path.name.startswith("tdm")]


def test_a_script_is_watched_by_all_that_watch_a_training(here: Path) -> None:
    written(
        "train.py",
        """
        import torch
        weight = torch.ones(2, requires_grad=True)
        torch.log(weight - 1).sum().backward()
    """,
    )
    ran = ended(*RUN[:-1], "watch", "--json", "all.json", "train.py")
    assert "What was watched: 5 magics" in ran.err
    report = json.loads(Path("all.json").read_text())
    assert (report["instrument"], report["found"], report["location"]["line"]) == ("nanhunt", True, 4)
    assert set(report["reports"]) == {"hangwatch", "memtrace", "gradwatch", "autograd", "nanhunt"}


# As Python runs it --------------------------------------------------------------------------------------------------------

SAYS_ALL = """
    import os, sys
    print(sys.argv, __name__, __file__, __package__, sys.path[0], __spec__ and __spec__.name, __doc__, sorted(globals()))
    print(sys.modules["__main__"].__dict__ is globals(), os.getcwd())
"""
CASES = {
    "raises": "def f():\n    raise ValueError('no such class')\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    f()\n",
    "exits with words": "import sys\nsys.exit('no data')\n",
    "exits well": "raise SystemExit\n",
    "is no Python": "x = (1,\ny = 2\n",
    "is interrupted": "raise KeyboardInterrupt\n",
    "has its own hook": "import sys\nsys.excepthook = lambda kind, error, trace: print('mine', kind.__name__, trace.tb_lineno)\n1 / 0\n",
    "forks": "import os\npid = os.fork()\nprint('child' if not pid else os.waitpid(pid, 0)[1], flush=True)\n",
}


@pytest.mark.parametrize("case", CASES)
def test_a_script_runs_as_python_runs_it(case: str, here: Path) -> None:
    written("sub/script.py", CASES[case])
    plain = ended(sys.executable, "sub/script.py", "--json", "x", "-m")
    watched = ended(*RUN, "--max-findings", "3", "sub/script.py", "--json", "x", "-m")
    said = NOT_WATCHED if plain.code == 0 else ""
    assert watched == plain._replace(err=plain.err + said)
    assert not Path("x").exists()


def test_a_module_runs_as_python_runs_it(here: Path) -> None:
    written("package/__init__.py", "")
    for name in ("__main__", "part"):
        written(f"package/{name}.py", SAYS_ALL)
    for name in ("package", "package.part"):
        plain, watched = ended(sys.executable, "-m", name, "a", "-m"), ended(*RUN, "-m", name, "a", "-m")
        assert watched == plain._replace(err=NOT_WATCHED)


def test_a_folder_with_a_main_runs(here: Path) -> None:
    written("app/__main__.py", SAYS_ALL)
    assert ended(*RUN, "app", "a").out == ended(sys.executable, "app", "a").out


@pytest.mark.parametrize("words", [("nothere.py",), ("-m", "nothere"), ("-m", "json.nothere")])
def test_what_is_not_there_is_said_as_python_says_it(words: tuple[str, ...], here: Path) -> None:
    assert ended(*RUN, *words) == ended(sys.executable, *words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "which script?"),
        (("--jason", "x", "train.py"), "unrecognized arguments: --jason"),
        (("--json", "no/such/folder.json", "train.py"), "its folder is not there"),
    ],
)
def test_a_wrong_command_runs_nothing(words: tuple[str, ...], said: str, here: Path) -> None:
    written("train.py", "print('ran')\n")
    code, out, err = ended(*RUN, *words)
    assert (code, out) == (2, "")
    assert said in err


def test_torch_reads_its_environment_after_the_script_has_set_it(here: Path) -> None:
    written(
        "train.py",
        """
        import os, sys
        assert "torch" not in sys.modules
        os.environ["OMP_NUM_THREADS"] = "1"
        import torch
        print(torch.get_num_threads(), [type(one).__name__ for one in sys.meta_path if type(one).__module__.startswith("torchdebug")])
        torch.ones(1, requires_grad=True).log().sum().backward()
        """,
    )
    code, out, err = ended(*RUN, "--json", "out.json", "--html", "{rank}.html", "train.py", OMP_NUM_THREADS="2")
    assert (code, out) == (0, "1 []\n")
    assert err.startswith("\n[✔ fine] No NaN or inf")
    assert json.loads(Path("out.json").read_text())["backward_count"] == 1
    assert "<!doctype html>" in Path("0.html").read_text()


TRAINS = """
    import os, signal, sys, time
    import torch

    def train(rank, fault):
        weight = torch.ones(3, requires_grad=True)
        for step in range(5):
            x = torch.full((3,), 2.0)
            if rank == 1 and step == 3:
                time.sleep(1)
                if fault == "nan":
                    x[1] = -1
                if fault == "is killed":
                    os.kill(os.getpid(), signal.SIGKILL)
            (x.log() * weight).sum().backward()
        print("trained", flush=True)
        if fault == "waits" or (rank == 0 and fault == "is killed"):
            for _ in range(600):
                time.sleep(0.05)

    if __name__ == "__main__":
        train(int(os.environ.get("RANK", 1)), sys.argv[1])
"""


def test_sigterm_ends_in_a_report(here: Path) -> None:
    written("train.py", TRAINS)
    with children.launched((*RUN, "train.py", "waits")) as (child,):
        child.wait_for("trained")
        child.process.terminate()
        code, _, err = child.ended()
    assert code == -signal.SIGTERM
    assert "No NaN or inf" in err
    assert "Traceback" not in err


# Ranks --------------------------------------------------------------------------------------------------------------------


def torchrun(*words: str) -> children.Ended:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port))
    return ended(*launcher, "-m", *RUN[2:], *words)


def merged(path: str) -> Any:
    return json.loads(Path(path).read_text())


def test_ranks_print_one_report_and_write_their_files(here: Path) -> None:
    written("train.py", TRAINS)
    code, out, err = torchrun("--keep-going", "--json", "all.json", "--html", "rank_{rank}.html", "train.py", "nan")
    assert (code, sorted(out.split())) == (0, ["trained", "trained"])
    assert err.count("[✖ problem] Rank 1 of 2: NaN from log in forward · step 0") == 1
    report = merged("all.json")
    assert (report["first"], report["found"]) == (1, True)
    assert [(one["rank"], one["state"], one["exit_code"]) for one in report["ranks"]] == [(0, "finished", 0), (1, "finished", 0)]
    assert report["ranks"][1]["report"]["found"]
    pages = sorted(path.name for path in Path().glob("*.html"))
    assert pages == ["rank_0.html", "rank_1.html"]
    assert "NaN from log" in Path("rank_1.html").read_text()
    assert "NaN from log" not in Path("rank_0.html").read_text()
    assert left() == []


def test_a_rank_that_is_killed_does_not_keep_the_others(here: Path) -> None:
    written("train.py", TRAINS)
    code, _, err = torchrun("--json", "all.json", "train.py", "is killed")
    assert code == 1
    report = merged("all.json")
    assert report["verdict"] == "Rank 1 left no report, last seen at train.py:10 in train"
    assert [(one["state"], one["exit_code"]) for one in report["ranks"]] == [("died", -15), ("died", None)]
    assert report["ranks"][0]["location"]["function"] == "train"
    assert err.count(report["verdict"]) >= 1
    assert left() == []


def by_hand(*words: str, ranks: tuple[int, ...] = (0, 1)) -> list[children.Ended]:
    """As a launcher does that has no store of its own."""
    envs = tuple({"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": str(rank)} for rank in ranks)
    with children.launched(*[(*RUN, *words)] * len(ranks), envs=envs, limit_s=100) as started:
        return [child.ended() for child in started]


def test_without_a_store_they_meet_in_a_folder(here: Path) -> None:
    written("train.py", TRAINS)
    first, second = by_hand("--json", "all.json", "train.py", "nan")
    assert first.code == 0
    assert "[✖ problem] Rank 1 of 2: NaN from log in forward · step 0" in first.err
    assert second.code == 1
    # Its own error, in the lines of the user's that led to it, and no report.
    assert second.err.startswith("Traceback of your own code (most recent call last):\n  train.py:22: train(")
    assert second.err.count("NaN from log in forward · step 0") == 1
    assert 'File "' not in second.err
    assert "[✖" not in second.err
    assert merged("all.json")["ranks"][1]["state"] == "raised"
    assert left() == []


def test_a_rank_that_never_begins_is_waited_for_a_few_seconds(here: Path) -> None:
    written("train.py", TRAINS)
    began_s = time.monotonic()
    (first,) = by_hand("--json", "all.json", "train.py", "", ranks=(0,))
    assert first.code == 0
    assert merged("all.json")["verdict"] == "Rank 1 left no report"
    assert time.monotonic() - began_s < 90
    assert left() == []
