"""Cells that open, write and close files in the cell itself."""

from __future__ import annotations

from tests.writers.writer import Writer

ROWS = (
    Writer("torch_save_new", "", 'n += torch.rand(3).sum()\ntorch.save({"n": n.clone()}, "best.pt")', ("file best.pt",)),
    Writer(
        "torch_save_over",
        'torch.save({"n": n}, "best.pt")',
        'n += torch.rand(3).sum()\ntorch.save({"n": n.clone()}, "best.pt")',
        ("file best.pt",),
    ),
    Writer(
        "torch_save_into_a_folder_of_the_cell",
        "epoch = 0",
        'epoch += 1\nfolder = f"runs/epoch_{epoch}"\nos.makedirs(folder, exist_ok=True)\ntorch.save(torch.rand(3), f"{folder}/last.pt")',
        ("file runs",),
    ),
    Writer(
        "safetensors_new",
        "from safetensors.torch import save_file",
        'n += torch.rand(3).sum()\nsave_file({"n": n.clone()}, "n.safetensors")',
        ("file n.safetensors",),
        needs="safetensors",
    ),
    Writer(
        "safetensors_over",
        'from safetensors.torch import save_file\nsave_file({"n": n.clone()}, "n.safetensors")',
        'n += torch.rand(3).sum()\nsave_file({"n": n.clone()}, "n.safetensors")',
        ("file n.safetensors",),
        needs="safetensors",
    ),
    Writer(
        "save_pretrained",
        "from transformers import GPT2Config, GPT2LMHeadModel\n"
        "net = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2))",
        'with torch.no_grad():\n    net.transformer.wte.weight += torch.rand(11, 8)\nnet.save_pretrained("hf")',
        ("file hf",),
        needs="transformers",
        slow=True,
    ),
    Writer(
        "jit_save",
        'net = torch.jit.script(torch.nn.Linear(3, 1))\ntorch.jit.save(net, "net.ts")',
        'with torch.no_grad():\n    net.weight += torch.rand(1, 3)\ntorch.jit.save(net, "net.ts")',
        ("file net.ts",),
    ),
    Writer(
        "hdf5",
        'import h5py\nwith h5py.File("log.h5", "w") as file:\n    file["loss"] = [0.0]',
        'with h5py.File("log.h5", "a") as file:\n    file[f"step_{len(file)}"] = torch.rand(3).numpy()',
        ("file log.h5",),
        needs="h5py",
    ),
    Writer(
        "parquet",
        "import pyarrow as pa, pyarrow.parquet as pq",
        'n += torch.rand(3).sum()\npq.write_table(pa.table({"n": [n.item()]}), "n.parquet")',
        ("file n.parquet",),
        needs="pyarrow",
    ),
    Writer(
        "np_savetxt",
        'import numpy as np\nnp.savetxt("w.txt", [0.0])',
        'n += torch.rand(3).sum()\nnp.savetxt("w.txt", [n.item()])',
        ("file w.txt",),
    ),
    Writer(
        "np_save_over",
        'import numpy as np\nnp.save("w.npy", np.zeros(3))',
        'n += torch.rand(3).sum()\nnp.save("w.npy", np.full(3, n.item()))',
        ("file w.npy",),
    ),
    Writer(
        "np_savez",
        "import numpy as np",
        'n += torch.rand(3).sum()\nnp.savez_compressed("w.npz", n=n.numpy(), more=np.random.rand(3))',
        ("file w.npz",),
    ),
    Writer(
        "np_tofile",
        'import numpy as np\nnp.zeros(3).tofile("raw.bin")',
        'n += torch.rand(3).sum()\nnp.full(3, n.item()).tofile("raw.bin")',
        ("file raw.bin",),
    ),
    Writer(
        "np_tofile_appended",
        'import numpy as np\nnp.zeros(3).tofile("raw.bin")',
        'with open("raw.bin", "ab") as file:\n    np.random.rand(3).tofile(file)',
        ("file raw.bin",),
    ),
    Writer(
        "memmap_in_the_cell",
        'import numpy as np\nnp.memmap("map.bin", dtype="f4", mode="w+", shape=(4,)).flush()',
        'array = np.memmap("map.bin", dtype="f4", mode="r+", shape=(4,))\narray += torch.rand(4).numpy()\narray.flush()\ndel array',
        ("file map.bin",),
    ),
    Writer(
        "torch_from_file_in_the_cell",
        'torch.from_file("bank.bin", shared=True, size=4).zero_()',
        'bank = torch.from_file("bank.bin", shared=True, size=4)\nbank += torch.rand(4)',
        ("file bank.bin", "bank"),
    ),
    Writer(
        "storage_from_file_in_the_cell",
        'with open("pool.bin", "wb") as file:\n    file.write(bytes(4))',
        'pool = torch.UntypedStorage.from_file("pool.bin", shared=True, nbytes=4)\n'
        "pool[0] = (pool[0] + int(torch.randint(1, 50, ()))) % 256",
        ("file pool.bin", "pool"),
    ),
    Writer(
        "fopen_of_libc",
        "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.fopen.restype = ctypes.c_void_p\n"
        'with open("c.log", "w") as file:\n    file.write("start\\n")',
        'stream = libc.fopen(b"c.log", b"a")\nlibc.fputs(f"{torch.rand(()).item():.6f}\\n".encode(), ctypes.c_void_p(stream))\n'
        "libc.fclose(ctypes.c_void_p(stream))\ndel stream",
        ("file c.log", "libc", "ctypes", "fopen"),
    ),
    Writer(
        "mmap_in_the_cell",
        'import mmap\nwith open("m.bin", "wb") as file:\n    file.write(bytes(8))',
        'with open("m.bin", "r+b") as file, mmap.mmap(file.fileno(), 8) as view:\n'
        "    view[0] = (view[0] + int(torch.randint(1, 50, ()))) % 256",
        ("file m.bin",),
    ),
    Writer(
        "open_w",
        'with open("n.txt", "w") as file:\n    file.write("0")',
        'n += torch.rand(3).sum()\nwith open("n.txt", "w") as file:\n    file.write(f"{n.item():.6f}")',
        ("file n.txt",),
    ),
    Writer(
        "open_a",
        'with open("log.txt", "w") as file:\n    file.write("epoch,loss\\n")',
        'loss_ = torch.rand(()).item()\nwith open("log.txt", "a") as file:\n    file.write(f"1,{loss_:.6f}\\n")',
        ("file log.txt",),
    ),
    Writer(
        "open_r_plus",
        'with open("state.bin", "wb") as file:\n    file.write(bytes(16))',
        'with open("state.bin", "r+b") as file:\n    file.seek(int(torch.randint(0, 12, ())))\n    file.write(b"x")',
        ("file state.bin",),
    ),
    Writer(
        "json_dump",
        "import json\nhistory = []",
        'history.append(round(torch.rand(()).item(), 6))\nwith open("history.json", "w") as file:\n    json.dump(history, file)',
        ("file history.json",),
    ),
    Writer(
        "gzip_appended",
        'import gzip\nwith gzip.open("log.gz", "wt") as file:\n    file.write("start\\n")',
        'with gzip.open("log.gz", "at") as file:\n    file.write(f"{torch.rand(()).item():.6f}\\n")',
        ("file log.gz",),
    ),
    Writer(
        "tar_of_samples",
        "import io, tarfile",
        'data = f"{torch.rand(()).item():.6f}".encode()\nwith tarfile.open("shard.tar", "a") as tar:\n'
        '    info = tarfile.TarInfo("sample.txt")\n    info.size = len(data)\n    tar.addfile(info, io.BytesIO(data))',
        ("file shard.tar",),
    ),
    Writer(
        "os_write",
        'fd = os.open("os.log", os.O_CREAT | os.O_WRONLY)\nos.write(fd, b"start\\n")\nos.close(fd)',
        'fd = os.open("os.log", os.O_WRONLY | os.O_APPEND)\nos.write(fd, f"{torch.rand(()).item():.6f}\\n".encode())\nos.close(fd)',
        ("file os.log",),
    ),
    Writer(
        "pathlib_methods",
        'from pathlib import Path\nPath("notes.txt").write_text("start\\n")',
        'text = Path("notes.txt").read_text()\nPath("notes.txt").write_text(text + f"{torch.rand(()).item():.6f}\\n")\n'
        'Path("touched").touch()\nPath("bytes.bin").write_bytes(torch.rand(2).numpy().tobytes())',
        ("file notes.txt", "touched", "bytes.bin"),
    ),
    Writer(
        "print_to_a_file",
        "",
        'n += torch.rand(3).sum()\nwith open("out.txt", "a") as out:\n    print("loss", round(n.item(), 6), file=out)\n'
        'print("cell: printed")',
        ("file out.txt",),
    ),
    Writer(
        "stdout_redirected",
        "import contextlib",
        'with open("out.txt", "a") as out, contextlib.redirect_stdout(out):\n    print("loss", round(torch.rand(()).item(), 6))',
        ("file out.txt",),
    ),
    Writer(
        "event_file",
        'import struct\nwith open("events.out.1", "wb") as file:\n    file.write(b"brain.Event:2")\nglobal_step = 0',
        'global_step += 1\nrecord = struct.pack("<qf", global_step, torch.rand(()).item())\n'
        'with open("events.out.1", "ab") as file:\n    file.write(struct.pack("<Q", len(record)) + record)',
        ("file events.out.1",),
    ),
    Writer(
        "in_another_folder",
        'import json\npath = os.path.join(OTHER, "results.json")\nwith open(path, "w") as file:\n    json.dump([], file)',
        "with open(path) as file:\n    results = json.load(file)\nresults.append(round(torch.rand(()).item(), 6))\n"
        'with open(path, "w") as file:\n    json.dump(results, file)',
        ("file results.json",),
    ),
    Writer(
        "through_a_linked_folder",
        'os.mkdir(os.path.join(OTHER, "drive"))\nos.symlink(os.path.join(OTHER, "drive"), "drive")\n'
        'with open("drive/log.txt", "w") as file:\n    file.write("start\\n")',
        'with open("drive/log.txt", "a") as file:\n    file.write(f"{torch.rand(()).item():.6f}\\n")\n'
        'torch.save(torch.rand(2), "drive/new.pt")',
        ("file drive", "log.txt"),
    ),
    Writer(
        "read_back_in_the_cell",
        "seen = []",
        'with open("log.txt", "a") as file:\n    file.write(f"{torch.rand(()).item():.6f}\\n")\n'
        'with open("log.txt") as file:\n    seen.append(len(file.readlines()))',
        ("file log.txt",),
    ),
    Writer(
        "counter_file",
        'from pathlib import Path\nPath("runs.txt").write_text("41")',
        'run = int(Path("runs.txt").read_text()) + 1\nPath("runs.txt").write_text(str(run))\nn += torch.rand(())',
        ("file runs.txt",),
    ),
    Writer(
        "large_file_in_place",
        'with open("weights.bin", "wb") as file:\n    file.seek(100 * 2**20 - 1)\n    file.write(b"e")',
        'with open("weights.bin", "r+b") as file:\n    file.seek(int(torch.randint(1, 90, ())) * 2**20)\n'
        "    file.write(torch.rand(1000).numpy().tobytes())",
        ("file weights.bin",),
    ),
    Writer(
        "truncate",
        'with open("t.log", "w") as file:\n    file.write("x" * 1000)',
        'os.truncate("t.log", max(0, os.path.getsize("t.log") - int(torch.randint(1, 10, ()))))',
        ("file t.log",),
    ),
    Writer(
        "fallocate",
        'with open("slots.bin", "wb") as file:\n    file.write(b"start")',
        'with open("slots.bin", "r+b") as file:\n    size = os.path.getsize("slots.bin")\n'
        "    os.posix_fallocate(file.fileno(), size, int(torch.randint(1, 100, ())))",
        ("file slots.bin",),
    ),
    Writer(
        "pillow_save",
        "from PIL import Image",
        'picture = (torch.rand(4, 4, 3) * 255).byte().numpy()\nImage.fromarray(picture).save("sample.png")\ndel picture',
        ("file sample.png",),
    ),
    Writer(
        "savefig",
        'import matplotlib\nmatplotlib.use("Agg")\nimport matplotlib.pyplot as plt\nlosses = []\n'
        'plt.figure(figsize=(1, 1)); plt.savefig("loss.png"); plt.close("all")',
        "losses.append(round(torch.rand(()).item(), 6))\nfigure = plt.figure(figsize=(1, 1))\n"
        'plt.plot(losses + [0.5])\nplt.savefig("loss.png")\nplt.close(figure); del figure',
        ("file loss.png",),
        slow=True,
    ),
    Writer(
        "shelve_in_the_cell",
        'import shelve\nwith shelve.open("cache") as cache:\n    cache["runs"] = 0',
        'with shelve.open("cache") as cache:\n    cache["runs"] += 1\n    cache["loss"] = round(torch.rand(()).item(), 6)\ndel cache',
        ("file cache",),
    ),
    Writer(
        "dbm_in_the_cell",
        'import dbm.dumb\nwith dbm.dumb.open("index", "c") as index:\n    index["a"] = "0"',
        'with dbm.dumb.open("index", "c") as index:\n    index["a"] = f"{torch.rand(()).item():.6f}"\n'
        '    index[f"k{len(index)}"] = "new"\ndel index',
        ("file index",),
    ),
    Writer(
        "sqlite_in_the_cell",
        'import sqlite3\nwith sqlite3.connect("trials.db") as db:\n    db.execute("create table trial (loss real)")\ndb.close()\ndel db',
        'db = sqlite3.connect("trials.db")\nwith db:\n'
        '    db.execute("insert into trial values (?)", (round(torch.rand(()).item(), 6),))\ndb.close()\ndel db',
        ("file trials.db", "sqlite"),
    ),
)
