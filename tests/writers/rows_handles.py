"""Cells that write through what an earlier cell has opened: handles, mappings, loggers, threads, connections."""

from __future__ import annotations

from tests.writers.writer import Writer

_LOGGER = 'import logging\nlogger = logging.getLogger("train")\nlogger.setLevel("INFO")\nlogger.propagate = False\n'
_EVENTS = """import queue, threading
events = queue.Queue()
def drain():
    with open("events.log", "a") as out:
        while (line := events.get()) is not None:
            out.write(line)
            out.flush()
writer = threading.Thread(target=drain, daemon=True)
writer.start()"""

ROWS = (
    Writer(
        "handle_opened_earlier",
        'log = open("log.txt", "w")\nlog.write("start\\n")',
        'n += torch.rand(3).sum()\nprint(f"{n.item():.6f}", file=log, flush=True)',
        ("descriptor", "file log.txt", "log"),
        finish="log.close()",
    ),
    Writer(
        "handle_opened_earlier_not_flushed",
        'log = open("log.txt", "a")\nlog.write("start\\n")',
        'log.write(f"{torch.rand(()).item():.6f}\\n")',
        ("descriptor", "file log.txt", "log"),
        finish='log.write("end\\n")\nlog.close()',
    ),
    Writer(
        "handle_read_and_moved",
        'with open("data.txt", "w") as file:\n    file.write("\\n".join(map(str, range(100))))\ndata = open("data.txt")\nrows = []',
        'rows.append(float(data.readline()) + torch.rand(()).item())\nwith open("out.txt", "a") as out:\n'
        '    out.write(f"{rows[-1]:.6f}\\n")',
        ("descriptor", "file data.txt", "out.txt", "data"),
        finish="rest = data.readline()\ndata.close()",
    ),
    Writer(
        "unbuffered_r_plus_handle",
        'with open("ring.bin", "wb") as file:\n    file.write(bytes(32))\nring = open("ring.bin", "r+b", buffering=0)',
        "ring.write(torch.rand(1).numpy().tobytes())\nring.seek(2, os.SEEK_CUR)",
        ("descriptor", "file ring.bin", "ring"),
        finish='ring.write(b"end")\nring.close()',
    ),
    Writer(
        "descriptor_opened_earlier",
        'fd = os.open("fd.log", os.O_CREAT | os.O_RDWR)\nos.write(fd, b"start\\n")',
        'os.write(fd, f"{torch.rand(()).item():.6f}\\n".encode())',
        ("descriptor", "file fd.log", "fd"),
        finish='os.write(fd, b"end")\nos.close(fd)',
    ),
    Writer(
        "csv_writer_opened_earlier",
        'import csv\ntable = open("metrics.csv", "w", newline="")\nrows = csv.writer(table)\nrows.writerow(["step", "loss"])\nstep = 0',
        "step += 1\nrows.writerow([step, round(torch.rand(()).item(), 6)])\ntable.flush()",
        ("descriptor", "file metrics.csv", "table", "rows"),
        finish="table.close()",
    ),
    Writer(
        "pickle_handle_opened_earlier",
        'import pickle\nbuffer = open("replay.pkl", "ab")\npickle.dump("start", buffer)',
        "pickle.dump(torch.rand(2).tolist(), buffer)",
        ("descriptor", "file replay.pkl", "buffer"),
        finish="buffer.close()",
    ),
    Writer(
        "zip_opened_earlier",
        'import zipfile\narchive = zipfile.ZipFile("out.zip", "w")\narchive.writestr("readme.txt", "start")\nnumber = 0',
        'number += 1\narchive.writestr(f"sample_{number}.txt", f"{torch.rand(()).item():.6f}")',
        ("descriptor", "file out.zip", "archive"),
        finish="archive.close()",
    ),
    Writer(
        "tar_opened_earlier",
        'import io, tarfile\ntar = tarfile.open("out.tar", "w")\nnumber = 0',
        'number += 1\ndata = f"{torch.rand(()).item():.6f}".encode()\ninfo = tarfile.TarInfo(f"sample_{number}.txt")\n'
        "info.size = len(data)\ntar.addfile(info, io.BytesIO(data)); del info",
        ("descriptor", "file out.tar", "tar"),
        finish="tar.close()",
    ),
    Writer(
        "gzip_opened_earlier",
        'import gzip\npacked = gzip.open("log.gz", "wt")\npacked.write("start\\n")',
        'packed.write(f"{torch.rand(()).item():.6f}\\n")\npacked.flush()',
        ("descriptor", "file log.gz", "packed"),
        finish="packed.close()",
    ),
    Writer(
        "mmap_opened_earlier",
        'import mmap\nwith open("m.bin", "wb") as file:\n    file.write(bytes(8))\nhandle = open("m.bin", "r+b")\n'
        "view = mmap.mmap(handle.fileno(), 8)",
        "view[0] = (view[0] + int(torch.randint(1, 50, ()))) % 256\nview[1:3] = bytes([view[0], 7])",
        ("file m.bin", "view", "mmap"),
        finish="view.close()\nhandle.close()",
    ),
    Writer(
        "memmap_opened_earlier",
        'import numpy as np\narray = np.memmap("map.bin", dtype="f4", mode="w+", shape=(4,))',
        "array += torch.rand(4).numpy()",
        ("file map.bin", "array", "memmap"),
        finish="array.flush()\ndel array",
    ),
    Writer(
        "torch_from_file_opened_earlier",
        'bank = torch.from_file("bank.bin", shared=True, size=4)\nbank.zero_()',
        "bank += torch.rand(4)",
        ("file bank.bin", "bank"),
    ),
    Writer(
        "mapped_storage_moving_average",
        "shadow = torch.tensor([], dtype=torch.float32)\n"
        'shadow.set_(torch.UntypedStorage.from_file("ema.bin", shared=True, nbytes=16))\nshadow.fill_(1.0)',
        "shadow.mul_(0.9).add_(torch.rand(4), alpha=0.1)",
        ("file ema.bin", "shadow"),
    ),
    Writer(
        "file_handler_made_earlier",
        _LOGGER + 'logger.addHandler(logging.FileHandler("train.log"))\nlogger.info("start")',
        'n += torch.rand(3).sum()\nlogger.info("loss %.6f", n.item())',
        ("descriptor", "file train.log", "logger"),
        finish="logger.handlers[0].close()",
    ),
    Writer(
        "file_handler_made_in_the_cell",
        _LOGGER,
        'logger.addHandler(logging.FileHandler("train.log"))\nlogger.info("loss %.6f", torch.rand(()).item())\n'
        "handlers = len(logger.handlers)",
        ("file train.log", "logger"),
        finish='logger.info("end")\nfor handler in logger.handlers: handler.close()\nhandlers = len(logger.handlers)',
    ),
    Writer(
        "rotating_file_handler",
        _LOGGER + "import logging.handlers\n"
        'logger.addHandler(logging.handlers.RotatingFileHandler("train.log", maxBytes=60, backupCount=3))\n'
        'for step in range(4):\n    logger.info("step %d of the warm-up", step)',
        'logger.info("loss %.6f and more words", torch.rand(()).item())\nlogger.info("loss %.6f and more words", torch.rand(()).item())',
        ("descriptor", "file train.log", "logger"),
        finish="logger.handlers[0].close()",
    ),
    Writer(
        "event_thread_with_a_queue",
        _EVENTS,
        'n += torch.rand(3).sum()\nevents.put(f"{n.item():.6f}\\n")',
        ("thread", "file events.log", "writer", "events", "drain"),
        finish="events.put(None)\nwriter.join(5)",
    ),
    Writer(
        "timer_thread_that_flushes",
        "import collections, threading\npending, stop = collections.deque(), threading.Event()\n"
        "def flush():\n    while not stop.wait(0.02):\n        while pending:\n"
        '            with open("late.log", "a") as out:\n                out.write(pending.popleft())\n'
        "writer = threading.Thread(target=flush, daemon=True)\nwriter.start()",
        'n += torch.rand(3).sum()\npending.append(f"{n.item():.6f}\\n")',
        ("thread", "file late.log", "writer", "flush", "pending"),
        finish="import time\ntime.sleep(0.2)\nstop.set()\nwriter.join(5)",
    ),
    Writer(
        "executor_made_earlier",
        "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(1)\npool.submit(int).result()\nstep = 0",
        'step += 1\npool.submit(torch.save, torch.rand(3), f"async_{step}.pt")',
        ("thread", "file async_", "pool"),
        finish="pool.shutdown()",
    ),
    Writer(
        "sqlite_opened_earlier",
        'import sqlite3\ndb = sqlite3.connect("trials.db")\ndb.execute("create table trial (loss real)")\ndb.commit()',
        'db.execute("insert into trial values (?)", (round(torch.rand(()).item(), 6),))\ndb.commit()',
        ("database", "file trials.db", "db", "sqlite"),
        finish="db.close()",
    ),
    Writer(
        "sqlite_in_a_transaction",
        'import sqlite3\ndb = sqlite3.connect("trials.db")\ndb.execute("create table trial (loss real)")\n'
        'db.execute("insert into trial values (0.5)")',
        'db.execute("insert into trial values (?)", (round(torch.rand(()).item(), 6),))',
        ("database", "file trials.db", "db", "sqlite"),
        "refused",
        finish="db.commit()\ndb.close()",
    ),
    Writer(
        "sqlite_in_memory",
        'import sqlite3\ndb = sqlite3.connect(":memory:")\ndb.execute("create table trial (loss real)")',
        'db.execute("insert into trial values (?)", (round(torch.rand(()).item(), 6),))\n'
        'count = db.execute("select count(*) from trial").fetchone()[0]',
        ("database", "db", "sqlite"),
        finish='count = db.execute("select count(*) from trial").fetchone()[0]\ndb.close()',
    ),
    Writer(
        "shelve_opened_earlier",
        'import dbm.dumb, shelve\ncache = shelve.Shelf(dbm.dumb.open("cache", "c"))\ncache["runs"] = 0',
        'cache["runs"] += 1\ncache["loss"] = round(torch.rand(()).item(), 6)',
        ("file cache", "cache"),
        finish="cache.close()",
    ),
)
