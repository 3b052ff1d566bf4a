"""Threads and locks of one process."""

from __future__ import annotations

from tests.hang_cases.marks import WARM, planted

__all__ = ["CASES"]

STOPPED = "KeyboardInterrupt"

CASES = (
    planted(
        name="lock_of_a_thread_that_raised",
        cell="""
import threading

lock = threading.Lock()
means = {}


def evaluate(name, scores):
    lock.acquire() #!
    means[name] = sum(scores) / len(scores)
    lock.release()


worker = threading.Thread(target=evaluate, args=("empty", []), name="evaluator")
worker.start()
worker.join()
with lock: #!
    print(means)
""",
        cause=("lock_never_released",),
        kind=("lock",),
        says=("lock",),
        raises=STOPPED,
    ),
    planted(
        name="early_return_keeps_the_lock",
        cell="""
import threading


class Cache:
    def __init__(self):
        self.lock = threading.Lock()
        self.items = {}

    def get(self, key):
        self.lock.acquire() #!
        if key in self.items:
            return self.items[key]
        self.items[key] = key * 2
        self.lock.release()
        return self.items[key]


cache = Cache()
values = [cache.get(key) for key in (1, 2, 3, 1, 4)]
""",
        cause=("self_deadlock", "lock_never_released"),
        root="main",
        kind=("lock",),
        where="self.lock.acquire()",
        raises=STOPPED,
    ),
    planted(
        name="method_calls_method_under_the_same_lock",
        cell="""
import threading

import torch


class Ema:
    def __init__(self, model, decay=0.9):
        self.lock = threading.Lock()
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.decay = decay

    def reset(self, model):
        with self.lock: #!
            self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model):
        with self.lock:
            for name, p in model.named_parameters():
                if name not in self.shadow or not torch.isfinite(self.shadow[name]).all():
                    self.reset(model)
                self.shadow[name].lerp_(p.detach(), 1 - self.decay)


model = torch.nn.Linear(4, 4)
ema = Ema(model)
for step in range(5):
    if step == 3:
        ema.shadow["bias"][0] = float("nan")
    ema.update(model)
""",
        cause=("self_deadlock",),
        root="main",
        kind=("lock",),
        where="with self.lock",
        raises=STOPPED,
    ),
    planted(
        name="finalizer_takes_a_lock_that_is_held",
        cell="""
import threading

registry_lock = threading.Lock()
registry = {}


class Buffer:
    def __init__(self, key):
        self.key = key
        with registry_lock:
            registry[key] = bytearray(16)

    def __del__(self):
        with registry_lock: #!
            registry.pop(self.key, None)


current = Buffer("a")
with registry_lock:
    size = sum(len(part) for part in registry.values())
    current = None
""",
        cause=("self_deadlock",),
        root="main",
        kind=("lock",),
        raises="KeyboardInterrupt|",  # an exception in a finalizer is only printed
    ),
    planted(
        name="two_threads_two_locks",
        cell="""
import threading
import time

weights = threading.Lock()
metrics = threading.Lock()


def save():
    with weights:
        time.sleep(0.3)
        with metrics: #!
            pass


def report():
    with metrics:
        time.sleep(0.3)
        with weights: #!
            pass


threads = [threading.Thread(target=save, name="saver", daemon=True), threading.Thread(target=report, name="reporter", daemon=True)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
""",
        cause=("deadlock",),
        root="thread saver|thread reporter",
        kind=("lock",),
        edges=(("main", "thread saver"), ("thread saver", "thread reporter"), ("thread reporter", "thread saver")),
        raises=STOPPED,
    ),
    planted(
        name="three_threads_three_rlocks",
        cell="""
import threading

forks = [threading.RLock() for _ in range(3)]
seated = threading.Barrier(3)


def eat(place):
    with forks[place]:
        seated.wait()
        with forks[(place + 1) % 3]: #!
            return place


names = ("kant", "hume", "mill")
threads = [threading.Thread(target=eat, args=(place,), name=name, daemon=True) for place, name in enumerate(names)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
""",
        cause=("deadlock",),
        root="thread kant|thread hume|thread mill",
        kind=("lock",),
        edges=(("thread kant", "thread hume"), ("thread hume", "thread mill"), ("thread mill", "thread kant")),
        raises=STOPPED,
    ),
    planted(
        name="join_of_a_thread_that_wants_our_lock",
        cell="""
import threading

history_lock = threading.Lock()
history = []


def log(value):
    with history_lock: #!
        history.append(value)


with history_lock:
    writer = threading.Thread(target=log, args=(0.5,), name="writer", daemon=True)
    writer.start()
    writer.join() #!
    print(history)
""",
        cause=("deadlock",),
        edges=(("main", "thread writer"), ("thread writer", "main")),
        raises=STOPPED,
    ),
    planted(
        name="rlock_whose_owner_has_ended",
        cell="""
import threading

state = threading.RLock()


def warm_up():
    state.acquire()
    state.acquire() #!
    state.release()


starter = threading.Thread(target=warm_up, name="starter")
starter.start()
starter.join()
for epoch in range(3):
    with state: #!
        print(epoch)
""",
        cause=("lock_never_released",),
        kind=("lock",),
        raises=STOPPED,
    ),
    planted(
        name="semaphore_used_up",
        cell="""
import threading

slots = threading.BoundedSemaphore(2)


def infer(batch):
    slots.acquire() #!
    if batch % 2:
        return None
    result = batch * 10
    slots.release()
    return result


print([infer(batch) for batch in range(8)])
""",
        cause=("lock_never_released", "self_deadlock"),
        root="main",
        kind=("lock", "event"),
        raises=STOPPED,
    ),
    planted(
        name="no_sentinel_in_the_queue",
        cell="""
import queue
import threading

batches = queue.Queue(maxsize=8)


def produce():
    for index in range(5):
        batches.put(index)


threading.Thread(target=produce, name="producer").start()
total = 0
for batch in iter(batches.get, None): #!
    total += batch
""",
        cause=("queue_never_fed",),
        root="main",
        kind=("queue",),
        raises=STOPPED,
    ),
    planted(
        name="producer_died_of_an_exception",
        cell="""
import queue
import threading

ROWS = [{"x": 1.0}, {"x": 2.0}, {"y": 3.0}, {"x": 4.0}]
prefetched = queue.Queue()


def read():
    for row in ROWS:
        prefetched.put(row["x"]) #!
    prefetched.put(None)


reader = threading.Thread(target=read, name="reader", daemon=True)
reader.start()
seen = []
while (value := prefetched.get()) is not None: #!
    seen.append(value)
""",
        cause=("queue_never_fed",),
        kind=("queue", "dead"),
        raises=STOPPED,
    ),
    planted(
        name="full_queue_that_nobody_empties",
        cell="""
import queue
import threading

results = queue.Queue(maxsize=4)


def consume():
    for _ in range(3):
        results.get()


threading.Thread(target=consume, name="consumer").start()
for step in range(20):
    results.put({"step": step}) #!
""",
        cause=("queue_never_fed", "deadlock"),
        root="main",
        kind=("queue",),
        says=("full|put|room|taken|consum",),
        raises=STOPPED,
    ),
    planted(
        name="task_done_forgotten",
        cell="""
import queue
import threading

jobs = queue.Queue()


def work():
    while True:
        job = jobs.get()
        if job is None:
            break
        if job == 3:
            continue
        jobs.task_done()


threading.Thread(target=work, name="worker-a", daemon=True).start()
for job in range(6):
    jobs.put(job)
jobs.join() #!
jobs.put(None)
""",
        cause=("queue_never_fed", "event_never_set", "deadlock"),
        kind=("queue", "join", "event", "lock"),
        raises=STOPPED,
    ),
    planted(
        name="event_set_on_the_wrong_object",
        cell="""
import threading


class Trainer:
    def __init__(self):
        self.ready = threading.Event()
        self.steps = 0

    def run(self):
        self.ready.wait() #!
        self.steps = 100


trainer = Trainer()
thread = threading.Thread(target=trainer.run, name="trainer", daemon=True)
thread.start()
trainer.ready = threading.Event()
trainer.ready.set()
thread.join()
""",
        cause=("event_never_set",),
        root="thread trainer",
        kind=("event",),
        where="self.ready.wait()",
        edges=(("main", "thread trainer"),),
        raises=STOPPED,
    ),
    planted(
        name="condition_notified_too_early",
        cell="""
import threading
import time

changed = threading.Condition()
weights = []


def publish():
    with changed:
        weights.append(1.0)
        changed.notify_all()


publisher = threading.Thread(target=publish, name="publisher")
publisher.start()
time.sleep(0.2)
with changed:
    changed.wait() #!
    print(weights)
""",
        cause=("event_never_set",),
        root="main",
        kind=("event", "lock"),
        raises=STOPPED,
    ),
    planted(
        name="barrier_for_one_too_many",
        cell="""
import threading

WORKERS = 2
start = threading.Barrier(WORKERS + 1)


def step(index):
    start.wait() #!
    return index


threads = [threading.Thread(target=step, args=(index,), name=f"stepper-{index}", daemon=True) for index in range(WORKERS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
""",
        cause=("event_never_set", "lock_never_released", "deadlock"),
        root="thread stepper-0|thread stepper-1",
        kind=("event", "lock"),
        edges=(("main", "thread stepper-0"),),
        raises=STOPPED,
    ),
    planted(
        name="future_of_the_same_one_thread_pool",
        cell="""
from concurrent.futures import ThreadPoolExecutor

pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="features")


def tokenize(text):
    return text.split()


def encode(text):
    tokens = pool.submit(tokenize, text)
    return [len(token) for token in tokens.result()] #!


print(pool.submit(encode, "a bb ccc").result())
""",
        cause=("deadlock", "self_deadlock"),
        root="thread features_0",
        edges=(("main", "thread features_0"),),
        says=("future|executor|pool",),
        raises=STOPPED,
    ),
    planted(
        name="pool_of_two_that_waits_for_four",
        cell="""
import threading
from concurrent.futures import ThreadPoolExecutor

gate = threading.Barrier(4)


def shard(index):
    gate.wait() #!
    return index


with ThreadPoolExecutor(max_workers=2, thread_name_prefix="shard") as pool:
    print(list(pool.map(shard, range(4))))
""",
        cause=("event_never_set", "lock_never_released", "deadlock"),
        root="thread shard_0|thread shard_1",
        kind=("event", "lock"),
        raises=STOPPED,
    ),
    planted(
        name="event_set_only_after_the_pool_has_ended",
        cell="""
import threading
from concurrent.futures import ThreadPoolExecutor

finish = threading.Event()


def monitor(losses):
    finish.wait() #!
    return max(losses)


losses = []
with ThreadPoolExecutor(max_workers=1, thread_name_prefix="monitor") as pool: #!
    watched = pool.submit(monitor, losses)
    losses.extend([3.0, 2.0, 1.0])
finish.set()
print(watched.result())
""",
        cause=("event_never_set", "deadlock"),
        root="thread monitor_0",
        kind=("event",),
        edges=(("main", "thread monitor_0"),),
        raises=STOPPED,
    ),
    planted(
        name="import_that_joins_an_importer",
        files=(
            (
                "plugin_registry.py",
                """import threading

FOUND = []


def discover():
    from plugin_registry import FOUND

    FOUND.append("adam")


finder = threading.Thread(target=discover, name="finder", daemon=True)
finder.start()
finder.join()
""",
            ),
        ),
        cell="""
import sys

sys.path.insert(0, "")
import plugin_registry

print(plugin_registry.FOUND)
""",
        cause=("deadlock",),
        edges=(("main", "thread finder"), ("thread finder", "main")),
        raises=STOPPED,
    ),
    planted(
        name="backward_hook_takes_the_lock_of_the_step",
        setup=WARM,
        cell="""
import threading

import torch

stats_lock = threading.Lock()
norms = []


def keep_norm(grad):
    with stats_lock: #!
        norms.append(grad.norm())


model = torch.nn.Linear(8, 1)
model.weight.register_hook(keep_norm)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(torch.randn(16, 8)).pow(2).mean()
    optimizer.zero_grad()
    if step < 2:
        loss.backward()
    else:
        with stats_lock:
            norms.clear()
            loss.backward()
    optimizer.step()
""",
        cause=("self_deadlock", "deadlock"),
        root="main",
        kind=("lock",),
        where="with stats_lock",
        raises=STOPPED,
    ),
    planted(
        name="stop_pressed_on_a_wait_for_an_event",
        cell="""
import threading

go = threading.Event()
print("waiting for the other notebook")
go.wait() #!
""",
        ends="interrupt",
        interrupt_s=6,
        cause=("event_never_set",),
        root="main",
        kind=("event",),
        raises=STOPPED,
    ),
)
