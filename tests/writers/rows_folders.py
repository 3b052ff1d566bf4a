"""Cells that change folders, names, links, modes and what the process itself has: its working directory, its environment."""

from __future__ import annotations

from tests.writers.writer import Writer

_CHECKPOINTS = 'os.mkdir("ckpt")\nfor step in range(3):\n    torch.save(torch.full((2,), float(step)), f"ckpt/step_{step:04d}.pt")\n'

ROWS = (
    Writer(
        "chdir_then_write",
        'os.makedirs("run/a")\nwith open("run/loss.txt", "w") as file:\n    file.write("start\\n")',
        'os.chdir("run")\nwith open("loss.txt", "a") as file:\n    file.write(f"{torch.rand(()).item():.6f}\\n")\n'
        'os.makedirs("run", exist_ok=True)',
        ("cwd", "file loss.txt", "chdir", "run"),
    ),
    Writer(
        "environ",
        'os.environ["RUN_NUMBER"] = "0"',
        'os.environ["RUN_NUMBER"] = str(int(os.environ["RUN_NUMBER"]) + 1)\nos.environ[f"RUN_{os.environ[\'RUN_NUMBER\']}"] = "seen"\n'
        'os.environ.pop("LANGUAGE", None)\nn += torch.rand(())',
        ("environ", "RUN_NUMBER"),
    ),
    Writer(
        "file_named_by_the_environ",
        'os.environ["RANK_FILE"] = "a"',
        'os.environ["RANK_FILE"] += "b"\nwith open(os.environ["RANK_FILE"], "w") as file:\n    file.write(f"{torch.rand(()).item():.6f}")',
        ("environ", "RANK_FILE", "file ab"),
    ),
    Writer(
        "atomic_replace",
        'torch.save({"n": n}, "last.pt")',
        'n += torch.rand(3).sum()\ntorch.save({"n": n.clone()}, "last.pt.tmp")\nos.replace("last.pt.tmp", "last.pt")',
        ("file last.pt",),
    ),
    Writer(
        "rename_to_backup",
        'with open("log.txt", "w") as file:\n    file.write("start\\n")',
        'os.rename("log.txt", "log.bak")\nwith open("log.txt", "w") as file:\n    file.write(f"{torch.rand(()).item():.6f}\\n")',
        ("file log.txt", "log.bak"),
    ),
    Writer(
        "remove",
        'for name in "abcdef":\n    with open(f"{name}.tmp", "w") as file:\n        file.write(name)',
        'left = sorted(name for name in os.listdir() if name.endswith(".tmp"))\nif left:\n'
        "    os.remove(left[int(torch.randint(0, len(left), ()))])",
        ("file .tmp",),
    ),
    Writer(
        "rmtree_then_anew",
        'import shutil\nos.makedirs("out/old")\nwith open("out/old/keep.txt", "w") as file:\n    file.write("precious")',
        'shutil.rmtree("out")\nos.makedirs("out")\ntorch.save(torch.rand(3), "out/new.pt")',
        ("file out",),
    ),
    Writer(
        "copytree",
        'import shutil\nos.makedirs("data/in")\nwith open("data/in/a.txt", "w") as file:\n    file.write("a")',
        'n += torch.rand(())\ntarget = f"copy_{len(os.listdir())}"\nshutil.copytree("data", target)\n'
        'with open(f"{target}/in/a.txt", "a") as file:\n    file.write(f"{n.item():.6f}")',
        ("file copy_",),
    ),
    Writer(
        "move",
        'import shutil\nos.mkdir("done")\nfor number in range(5):\n    with open(f"job_{number}.txt", "w") as file:\n'
        "        file.write(str(number))",
        'jobs = sorted(name for name in os.listdir() if name.startswith("job_"))\nif jobs:\n'
        '    shutil.move(jobs[int(torch.randint(0, len(jobs), ()))], "done")',
        ("file job_", "done"),
    ),
    Writer(
        "move_to_another_folder",
        'import shutil\nfor number in range(5):\n    with open(f"job_{number}.txt", "w") as file:\n        file.write(str(number))',
        'jobs = sorted(name for name in os.listdir() if name.startswith("job_"))\nif jobs:\n'
        "    shutil.move(jobs[int(torch.randint(0, len(jobs), ()))], OTHER)",
        ("file job_",),
    ),
    Writer(
        "symlink_to_the_latest",
        'torch.save(torch.zeros(2), "ckpt_0.pt")\nos.symlink("ckpt_0.pt", "latest.pt")\nstep = 0',
        'step += 1\ntorch.save(torch.rand(2), f"ckpt_{step}.pt")\nos.remove("latest.pt")\nos.symlink(f"ckpt_{step}.pt", "latest.pt")',
        ("file latest.pt", "ckpt_1.pt"),
    ),
    Writer(
        "write_through_a_symlink",
        'torch.save(torch.zeros(2), os.path.join(OTHER, "real.pt"))\nos.symlink(os.path.join(OTHER, "real.pt"), "latest.pt")',
        'n += torch.rand(3).sum()\ntorch.save({"n": n.clone()}, "latest.pt")',
        ("file latest.pt", "real.pt"),
    ),
    Writer(
        "hard_link_then_write",
        'with open("log.txt", "w") as file:\n    file.write("start\\n")\nos.link("log.txt", "log_too.txt")',
        'with open("log_too.txt", "a") as file:\n    file.write(f"{torch.rand(()).item():.6f}\\n")\n'
        'if not os.path.exists("third.txt"):\n    os.link("log.txt", "third.txt")',
        ("file log_too.txt", "log.txt", "third.txt"),
    ),
    Writer(
        "chmod",
        'with open("run.sh", "w") as file:\n    file.write("#!/bin/sh\\n")\nos.chmod("run.sh", 0o600)',
        'os.chmod("run.sh", (os.stat("run.sh").st_mode & 0o777) ^ 0o011)\nn += torch.rand(())',
        ("file run.sh",),
    ),
    Writer(
        "read_only_after_write",
        'with open("final.txt", "w") as file:\n    file.write("start")\nos.chmod("final.txt", 0o644)',
        'os.chmod("final.txt", 0o644)\nwith open("final.txt", "a") as file:\n    file.write(f" {torch.rand(()).item():.6f}")\n'
        'os.chmod("final.txt", 0o444)',
        ("file final.txt",),
    ),
    Writer(
        "mkdir_then_list",
        'os.makedirs("runs", exist_ok=True)',
        'run = len(os.listdir("runs"))\nos.mkdir(f"runs/{run:03d}")\ntorch.save(torch.rand(2), f"runs/{run:03d}/w.pt")\n'
        'names = sorted(os.listdir("runs"))',
        ("file runs",),
    ),
    Writer(
        "keep_last_three",
        f"import glob\n{_CHECKPOINTS}step = 3",
        'torch.save(torch.rand(2), f"ckpt/step_{step:04d}.pt")\nstep += 1\nfor old in sorted(glob.glob("ckpt/*.pt"))[:-3]:\n'
        "    os.remove(old)",
        ("file ckpt",),
    ),
    Writer(
        "named_temporary_file",
        "import tempfile\nmade = 0",
        'with tempfile.NamedTemporaryFile("w", dir=OTHER, delete=False) as file:\n    file.write(f"{torch.rand(()).item():.6f}")\n'
        "made += 1\ndel file",
        ("file tmp",),
    ),
    Writer(
        "mkdtemp",
        "import tempfile\nmade = 0",
        'folder = tempfile.mkdtemp()\ntorch.save(torch.rand(2), os.path.join(folder, "w.pt"))\nmade += 1\ndel folder',
        ("file tmp",),
    ),
)
