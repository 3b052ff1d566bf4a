"""Cells that reach out of their process: requests, sockets, processes, threads that write."""

from __future__ import annotations

from tests.writers.writer import Writer

ROWS = (
    Writer(
        "thread_joined_in_the_cell",
        "import threading",
        'n += torch.rand(3).sum()\nsaver = threading.Thread(target=torch.save, args=({"n": n.clone()}, "best.pt"))\nsaver.start()\n'
        "saver.join()\ndel saver",
        ("thread", "file best.pt"),
    ),
    Writer(
        "thread_joined_later",
        'import threading\nsavers = []\ntorch.save({"n": n}, "best.pt")',
        "n += torch.rand(3).sum()\n"
        'savers.append(threading.Thread(target=torch.save, args=({"n": n.clone()}, f"best_{len(savers)}.pt")))\nsavers[-1].start()',
        ("thread", "file best_", "savers"),
        finish="for saver in savers: saver.join(5)\ncount = len(savers)\ndel savers, saver",
    ),
    Writer(
        "thread_pool_in_the_cell",
        'from concurrent.futures import ThreadPoolExecutor\ndef append(value):\n    with open("pool.log", "a") as file:\n'
        '        file.write(f"{value:.6f}\\n")',
        "with ThreadPoolExecutor(1) as pool:\n    list(pool.map(append, torch.rand(4).tolist()))\ndel pool",
        ("thread", "file pool.log"),
    ),
    Writer(
        "thread_that_outlives_the_cell",
        'import threading, time\ndef late(value):\n    time.sleep(0.3)\n    with open("late.txt", "a") as file:\n'
        '        file.write(f"{value:.6f}\\n")',
        "threading.Thread(target=late, args=(torch.rand(()).item(),), daemon=True).start()",
        ("thread", "file late.txt", "late"),
        "refused",
        finish='for thread in threading.enumerate():\n    if "late" in thread.name: thread.join(5)\ndel thread',
    ),
    Writer(
        "forked_workers_name_files_by_pid",
        'import multiprocessing\ncontext = multiprocessing.get_context("fork")\ndef work(value):\n'
        '    with open(f"part_{os.getpid()}.txt", "w") as file:\n        file.write(f"{value:.6f}")',
        "worker = context.Process(target=work, args=(torch.rand(()).item(),))\nworker.start()\nworker.join()\ndel worker",
        ("process", "file part_", "worker"),
        slow=True,
    ),
    Writer(
        "loader_workers_write",
        "from torch.utils.data import DataLoader\ndef begin(number):\n"
        '    with open(f"worker_{os.getpid()}.txt", "w") as file:\n        file.write(f"{number}")',
        "total = sum(batch.sum().item() for batch in DataLoader(range(8), 4, num_workers=1, worker_init_fn=begin, shuffle=True))\n"
        "n += torch.rand(())",
        ("process", "file worker_", "DataLoader"),
        slow=True,
    ),
    Writer(
        "urllib_post",
        "import urllib.request",
        "answer = urllib.request.urlopen(URL, data=str(torch.rand(()).item()).encode()).read().decode()",
        ("request", "socket", "urllib", "URL", "127.0.0.1"),
        "refused",
    ),
    Writer(
        "requests_post",
        "import requests",
        'answer = requests.post(URL, json={"loss": torch.rand(()).item()}, timeout=10).text',
        ("request", "socket", "URL", "127.0.0.1"),
        "refused",
        needs="requests",
    ),
    Writer(
        "session_opened_earlier",
        "import http.client\nclient = http.client.HTTPConnection(HOST, PORT)\nclient.connect()",
        'client.request("POST", URL, body=str(torch.rand(()).item()))\nanswer = client.getresponse().read().decode()',
        ("request", "socket", "connection", "client", "127.0.0.1"),
        "refused",
        finish="client.close()",
    ),
    Writer(
        "raw_socket",
        "import socket",
        'with socket.create_connection((HOST, PORT)) as link:\n    link.sendall(f"POST {URL} HTTP/1.0\\r\\n\\r\\n".encode())\n'
        "    answer = link.recv(12).decode()\n"
        "del link; n += torch.rand(())",
        ("socket", "connection", "127.0.0.1"),
        "refused",
    ),
    Writer(
        "socket_opened_earlier",
        "import socket\nlink = socket.create_connection((HOST, PORT))",
        'link.sendall(f"POST {URL} HTTP/1.1\\r\\nHost: a\\r\\nContent-Length: 0\\r\\n\\r\\n".encode())\nlink.recv(4096)\n'
        "n += torch.rand(())",
        ("socket", "connection", "link", "127.0.0.1"),
        "refused",
        finish="link.close()",
    ),
    Writer(
        "server_in_a_thread_of_the_notebook",
        "import threading, urllib.request\nfrom http.server import BaseHTTPRequestHandler, HTTPServer\nhits = []\n"
        "class Handler(BaseHTTPRequestHandler):\n    def do_POST(self):\n        hits.append(self.path)\n"
        "        self.send_response(204)\n"
        "        self.end_headers()\n    def log_message(self, *words): pass\n"
        'server = HTTPServer(("127.0.0.1", 0), Handler)\nthreading.Thread(target=server.serve_forever, daemon=True).start()',
        'urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/loss", data=str(torch.rand(()).item()).encode()).close()',
        ("request", "socket", "urllib", "127.0.0.1", "server"),
        "refused",
        finish="server.shutdown()\nserver.server_close()",
    ),
    Writer(
        "subprocess_sh",
        "import subprocess",
        'n += torch.rand(())\nsubprocess.run(["sh", "-c", f"echo {n.item():.6f} >> log.txt"], check=True)',
        ("process", "subprocess", "log.txt", "sh"),
        "refused",
    ),
    Writer(
        "os_system",
        "",
        'n += torch.rand(())\nos.system(f"echo {n.item():.6f} >> log.txt")',
        ("process", "command", "os.system", "log.txt"),
        "refused",
    ),
    Writer(
        "posix_spawn",
        "",
        'n += torch.rand(())\npid = os.posix_spawn("/bin/sh", ["sh", "-c", f"echo {n.item():.6f} >> log.txt"], os.environ)\n'
        "os.waitpid(pid, 0)\npid = 0",
        ("process", "command", "posix_spawn", "log.txt", "/bin/sh"),
        "refused",
    ),
    Writer(
        "fork_that_writes",
        "",
        "n += torch.rand(())\nif (pid := os.fork()) == 0:\n"
        '    os.write(os.open("log.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND), f"{n.item():.6f}\\n".encode())\n'
        "    os._exit(0)\nos.waitpid(pid, 0); pid = 0",
        ("process", "fork", "log.txt"),
        "equal",
    ),
    Writer(
        "process_left_running",
        "import subprocess",
        'n += torch.rand(())\nrunning = subprocess.Popen(["sh", "-c", f"echo {n.item():.6f} >> log.txt; sleep 30"])',
        ("process", "subprocess", "log.txt", "Popen", "sh"),
        "refused",
        finish="import time\ntime.sleep(0.1)",
    ),
    Writer(
        "pipe_to_a_process_started_earlier",
        'import subprocess\nsink = subprocess.Popen(["sh", "-c", "cat >> log.txt"], stdin=subprocess.PIPE)',
        'sink.stdin.write(f"{torch.rand(()).item():.6f}\\n".encode())\nsink.stdin.flush()',
        ("process", "pipe", "sink", "descriptor"),
        "refused",
        finish="sink.stdin.close()\nsink.wait(5)",
    ),
    Writer(
        "named_pipe_to_a_thread",
        'import threading\nos.mkfifo("feed")\ndef collect():\n    with open("feed") as feed, open("got.txt", "a") as got:\n'
        "        for line in feed:\n            got.write(line)\n            got.flush()\n"
        'reader = threading.Thread(target=collect, daemon=True)\nreader.start()\nfeed_out = open("feed", "w")',
        'print(f"{torch.rand(()).item():.6f}", file=feed_out, flush=True)',
        ("pipe", "feed", "thread", "descriptor", "fifo"),
        "refused",
        finish="feed_out.close()\nreader.join(5)",
    ),
)
