"""Cells that read and write files, all the same each time; `root` is an empty folder of the test's own."""

from __future__ import annotations

CELLS = {
    "saved, listed and loaded, in a new folder": (
        "",
        """\
with tempfile.TemporaryDirectory() as folder:
    for i in range(3):
        torch.save(torch.full((2,), float(i)), os.path.join(folder, f"{i}.pt"))
    x = torch.stack([torch.load(os.path.join(folder, name)) for name in sorted(os.listdir(folder))])
""",
    ),
    "a folder that is made": (
        "",
        """\
os.makedirs(root / "checkpoints")
torch.save(torch.ones(2), root / "checkpoints" / "last.pt")
x = torch.load(root / "checkpoints" / "last.pt") * 2
""",
    ),
    "going on from the last time": (
        "torch.manual_seed(0)\nnet = nn.Linear(2, 2)",
        """\
last = root / "last.pt"
if last.exists():
    net.load_state_dict(torch.load(last))
with torch.no_grad():
    net.weight.mul_(1.5)
torch.save(net.state_dict(), last)
""",
    ),
    "the last three are kept": (
        "for i in range(3): (root / f'c{i}').write_text(str(i))",
        """\
for i in range(3, 6):
    (root / f"c{i}").write_text(str(i))
    for old in sorted(root.glob("c*"))[:-3]:
        old.unlink()
x = torch.tensor([float(path.read_text()) for path in sorted(root.iterdir())])
""",
    ),
    "a folder that is removed and made anew": (
        "(root / 'out').mkdir()\n(root / 'out' / 'old').write_text('1')",
        """\
x = torch.ones(2) * len(os.listdir(root / "out"))
shutil.rmtree(root / "out")
(root / "out").mkdir()
(root / "out" / "new").write_text("2")
y = x + len(os.listdir(root / "out"))
""",
    ),
    "only if it is new": (
        "",
        """\
with open(root / "new", "x") as file:
    file.write("12")
x = torch.ones(2) * (root / "new").stat().st_size
""",
    ),
    "copied, moved, linked and packed": (
        "(root / 'a').write_text('4')",
        """\
shutil.copy(root / "a", root / "b")
shutil.move(root / "b", root / "c")
os.symlink("c", root / "latest")
os.link(root / "a", root / "d")
(root / "e").touch()
os.chmod(root / "e", 0o600)
shutil.make_archive(str(root / "all"), "zip", root_dir=root, base_dir="a")
shutil.unpack_archive(str(root / "all.zip"), str(root / "there"))
x = torch.ones(2) * float((root / "latest").read_text()) * len([name for _, _, names in os.walk(root) for name in names])
""",
    ),
    "a file that was open before": (
        "log = open(root / 'log.csv', 'w')\nlog.write('step\\n')",
        """\
for i in range(3):
    log.write(f"{i}\\n")
log.flush()
x = torch.ones(2) * len((root / "log.csv").read_text().splitlines())
""",
    ),
    "a file that was open before, to read and to add": (
        "log = open(root / 'log.txt', 'a+')\nlog.write('a\\n')",
        """\
log.write("b\\n")
log.seek(0)
x = torch.ones(2) * len(log.readlines())
""",
    ),
    "written by its number": (
        "number = os.open(root / 'raw', os.O_RDWR | os.O_CREAT)\nos.write(number, b'ab')",
        """\
os.write(number, b"abc")
other = os.open(root / "more", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.write(other, b"x")
os.close(other)
x = torch.ones(2) * os.path.getsize(root / "raw") * os.path.getsize(root / "more")
""",
    ),
    "a database that the cell opens": (
        "",
        """\
with contextlib.closing(sqlite3.connect(root / "runs.db")) as runs:
    runs.execute("create table run(loss)")
    runs.execute("insert into run values (2.0)")
    runs.commit()
    x = torch.ones(2) * runs.execute("select sum(loss) from run").fetchone()[0]
""",
    ),
    "memory that is a file": (
        "mapped = np.memmap(root / 'mapped', dtype='float32', mode='w+', shape=(4,))",
        "mapped[:] += 1\nx = torch.from_numpy(np.asarray(mapped)).sum()",
    ),
}
"""Setup and body."""
