"""Cells with one planted cause each; ``# <-`` stands at the guilty line, ``# <other`` where the other run went."""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    cause: str
    names: tuple[str, ...]
    source: str
    asked: tuple[str, ...] = ()
    before: str = ""


CASES = {
    "clock_in_the_op": Case("wall_clock", (), "import time\nx = torch.tensor([time.time()])  # <-\n", ("time.time",)),
    "clock_before_the_op": Case(
        "wall_clock", ("a",),
        """
        import time
        a = time.time()  # <-
        b = a * 2
        x = torch.tensor([b])
        """, ("time.time",),
    ),
    "clock_bound_by_from": Case(
        "wall_clock", ("a",),
        """
        from time import perf_counter as now
        a = now()  # <-
        x = torch.tensor([a])
        """, ("time.perf_counter",),
    ),
    "decoys": Case(
        "wall_clock", ("b",),
        """
        import time
        t0 = time.time()
        log = [t0]
        y = torch.zeros(3)
        b = time.perf_counter_ns()  # <-
        log.append(time.time() - t0)
        print("took", time.time() - t0, object())
        x = y + b
        print(time.time() - t0)
        """, ("time.perf_counter_ns",),
    ),
    "datetime": Case(
        "wall_clock", ("stamp",),
        """
        from datetime import datetime
        stamp = datetime.now()  # <-
        x = torch.tensor([stamp.microsecond])
        """, ("datetime.now",),
    ),
    "numpy_generator": Case(
        "numpy_random", ("rng",),
        """
        rng = np.random.default_rng()  # <-
        noise = rng.random(3)
        x = torch.from_numpy(noise)
        """, ("np.random.default_rng",),
    ),
    "numpy_in_one_line": Case(
        "numpy_random", ("noise",),
        """
        noise = np.random.default_rng().random(3)  # <-
        x = torch.from_numpy(noise)
        """, ("np.random.default_rng",),
    ),
    "numpy_random_state": Case(
        "numpy_random", ("r",),
        """
        r = np.random.RandomState()  # <-
        x = torch.tensor(r.rand(2))
        """, ("np.random.RandomState",),
    ),
    "numpy_seed_none": Case(
        "numpy_random", ("rng",),
        """
        seed = None
        rng = np.random.default_rng(seed)  # <-
        x = torch.tensor(rng.random(2))
        """, ("np.random.default_rng",),
    ),
    "numpy_seed_sequence": Case(
        "numpy_random", ("s",),
        """
        s = np.random.SeedSequence()  # <-
        rng = np.random.default_rng(s)
        x = torch.tensor(rng.random(2))
        """,
    ),
    "numpy_in_function": Case(
        "numpy_random", ("rng",),
        """
        def noise(n):
            rng = np.random.default_rng()  # <-
            values = rng.normal(size=n)
            return values * 2

        clean = torch.ones(3)
        x = clean + torch.from_numpy(noise(3))
        """,
    ),
    "python_random": Case(
        "python_random", ("r",),
        """
        r = random.Random()  # <-
        a = r.random()
        x = torch.tensor([a])
        """, ("random.Random",),
    ),
    "python_reseeded": Case(
        "python_random", ("random",),
        """
        random.seed()  # <-
        a = random.random()
        x = torch.tensor([a])
        """, ("random.seed",),
    ),
    "seeded_is_fine_and_other_is_not": Case(
        "python_random", ("b",),
        """
        a = random.random()
        b = random.Random().random()  # <-
        x = torch.tensor([a, b])
        """,
    ),
    "urandom": Case(
        "os_entropy", ("seed",),
        """
        import os
        seed = int.from_bytes(os.urandom(4), 'little')  # <-
        torch.manual_seed(seed)
        x = torch.tensor([seed])
        """, ("os.urandom",),
    ),
    "uuid": Case("os_entropy", ("a",), "import uuid\na = uuid.uuid4().int % 1000003  # <-\nx = torch.tensor([a])\n", ("uuid.uuid4",)),
    "secrets": Case("os_entropy", ("a",), "import secrets\na = secrets.randbelow(10**9)  # <-\nx = torch.tensor([a])\n"),
    "system_random": Case("os_entropy", ("a",), "r = random.SystemRandom()\na = r.random()  # <-\nx = torch.tensor([a])\n"),
    "torch_generator": Case(
        "unseeded_generator", ("g",),
        """
        g = torch.Generator()
        g.seed()  # <-
        x = torch.randn(3, generator=g)
        """, ("torch.Generator.seed",),
    ),
    "torch_seed": Case("unseeded_generator", ("s",), "s = torch.seed()  # <-\nx = torch.tensor([s % 1000003])\n", ("torch.seed",)),
    "set_of_objects": Case(
        "hash_order", ("node",),
        """
        class Node:
            def __init__(self, value):
                self.value = value

        nodes = [Node(i) for i in range(300)]
        some = set(nodes)
        order = []
        for node in some:  # <-
            order.append(node.value)
        x = torch.tensor(order)
        """,
    ),
    "set_in_a_comprehension": Case(
        "hash_order", ("order",),
        """
        class Node:
            pass

        nodes = [Node() for i in range(300)]
        for i, node in enumerate(nodes):
            node.value = i
        some = set(nodes)
        order = [node.value for node in some]  # <-
        x = torch.tensor(order)
        """,
    ),
    "address": Case(
        "hash_order", ("key",),
        """
        keep = []
        for i in range(64):
            keep.append(object())
        key = [id(one) for one in keep] + [id([])]  # <-
        x = torch.tensor(key)
        """, ("id",),
    ),
    "address_in_the_op": Case(
        "hash_order", (),
        """
        things = [[i] for i in range(50)]
        x = torch.tensor([id(t) for t in things])  # <-
        """, ("id",),
    ),
    "iterator": Case("state_leak", ("a",), "a = next(it)  # <-\nx = torch.tensor([a])\n", before="it = iter(range(100))"),
    "iterator_loop": Case(
        "state_leak", ("a",),
        """
        for a in it:  # <-
            x = torch.tensor([a])
            if a % 5 == 4: break
        """, before="it = (i for i in range(100000))",
    ),
    "counter_of_an_object": Case(
        "state_leak", ("box.n",),
        """
        box.n += 1  # <-
        x = torch.tensor([box.n])
        """, before="class Box: n = 0\nbox = Box()\nbox.n = 0",
    ),
    "list_that_grew": Case("state_leak", ("seen",), "seen.append(1)  # <-\nx = torch.tensor(len(seen))\n", before="seen = []"),
    "subprocess": Case(
        "outside_data", ("out",),
        """
        import subprocess, sys
        out = subprocess.check_output([sys.executable, '-S', '-c', 'import time; print(time.time_ns() % 10**9)'])  # <-
        x = torch.tensor([int(out)])
        """,
    ),
    "branch": Case(
        "control_flow", ("scale",),
        """
        import itertools, time
        if next(flip):
            scale = 2.0  # <-
        else:
            scale = 3.0  # <other
        x = torch.tensor([scale])
        """,
        before="import itertools\nflip = itertools.cycle([True, False])",
    ),
    "branch_around_the_op": Case(
        "control_flow", (),
        """
        x = torch.ones(2)
        late = next(flip)
        if late:
            y = x * 2  # <-
        else:
            y = x + 2  # <other
        """,
        before="import itertools\nflip = itertools.cycle([True, False])",
    ),
    "loop_count": Case(
        "control_flow", ("n",),
        """
        import time
        n = 0
        end = 2 + 3 * next(flip) + time.time() * 0
        while n < end:
            n += 1  # <-
        x = torch.tensor([n])
        """, ("time.time",),
        before="import itertools\nflip = itertools.cycle([True, False])",
    ),
    "loop_count_the_other_way": Case(
        "control_flow", ("n",),
        """
        n = 0
        for i in range(2 + 3 * next(flip)):
            n += 1  # <-
        x = torch.tensor([n])
        """,
        before="import itertools\nflip = itertools.cycle([False, True])",
    ),
    "dataset": Case(
        "numpy_random", ("self.rng",),
        """
        from torch.utils.data import DataLoader, Dataset
        import time

        class Noisy(Dataset):
            def __init__(self):
                self.made = time.time()
                self.rng = np.random.default_rng()  # <-

            def __len__(self):
                return 4

            def __getitem__(self, index):
                return float(index) + self.rng.random()

        loader = DataLoader(Noisy(), batch_size=2)
        for batch in loader:
            x = batch * 2
        """,
    ),
    "dataset_item": Case(
        "wall_clock", (),
        """
        from torch.utils.data import DataLoader, Dataset
        import time

        class Slow(Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                start = time.time()
                value = index * 2.0
                self.took = time.time() - start
                return value + time.time()  # <-

        for batch in DataLoader(Slow(), batch_size=2):
            x = batch * 2
        """, ("time.time",),
    ),
    "attribute_of_self": Case(
        "wall_clock", ("self.scale",),
        """
        import time
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.born = time.time()
                self.scale = time.time() % 1  # <-

            def forward(self, x):
                started = time.time()
                self.calls = started
                return x * self.scale

        net = Net()
        y = net(torch.ones(2))
        """,
    ),
    "third_iteration": Case(
        "wall_clock", ("value",),
        """
        import time
        values = []
        for i in range(5):
            value = i * 1.0
            if i == 2:
                value += time.time()  # <-
            values.append(value)
        x = torch.tensor(values)
        """,
    ),
    "generator_function": Case(
        "wall_clock", ("v",),
        """
        import time
        def stream():
            for i in range(3):
                junk = time.time()
                v = i + time.perf_counter()  # <-
                yield v

        x = torch.tensor(list(stream()))
        """,
    ),
    "closure": Case(
        "os_entropy", ("salt",),
        """
        import os
        def outer():
            salt = os.urandom(1)[0] + os.urandom(7)[0] * 256  # <-
            def inner(x):
                return x + salt
            return inner
        f = outer()
        x = torch.tensor([f(1)])
        """,
    ),
    "default_argument": Case("wall_clock", ("f",), "import time\ndef f(a=time.time()):  # <-\n    return a\nx = torch.tensor([f()])\n"),
    "lambda": Case("wall_clock", (), "import time\nf = lambda: time.time()  # <-\ny = 1\nx = torch.tensor([f()])\n"),
    "comprehension": Case("wall_clock", ("xs",), "import time\nxs = [time.time() + i for i in range(3)]  # <-\nx = torch.tensor(xs)\n"),
    "dict_value": Case(
        "wall_clock", ("config",),
        """
        import time
        config = {'a': 1}
        config['t'] = time.time()  # <-
        x = torch.tensor([config['t']])
        """,
    ),
    "list_filled_by_a_function": Case(
        "wall_clock", ("out",),
        """
        import time
        def fill(out):
            out.append(1.0)
            out.append(time.time())  # <-
            out.append(2.0)
        xs = []
        fill(xs)
        x = torch.tensor(xs)
        """,
    ),
    "multi_line": Case(
        "wall_clock", ("xs",),
        """
        import time
        xs = [
            1.0,
            time.time(),  # <-
            2.0,
        ]
        x = torch.tensor(
            xs,
        )
        """,
    ),
    "property": Case(
        "wall_clock", (),
        """
        import time
        class Clock:
            @property
            def now(self):
                return time.time()  # <-
        clock = Clock()
        x = torch.tensor([clock.now])
        """,
    ),
    "objects_in_a_list": Case(
        "wall_clock", ("self.value",),
        """
        import time
        class Item:
            def __init__(self):
                self.value = time.time()  # <-
        items = [Item() for _ in range(3)]
        x = torch.tensor([item.value for item in items])
        """,
    ),
    "dataclass": Case(
        "wall_clock", ("cfg.scale",),
        """
        import time
        from dataclasses import dataclass
        @dataclass
        class Config:
            scale: float
        cfg = Config(scale=time.time())  # <-
        x = torch.tensor([cfg.scale])
        """,
    ),
    "global_in_function": Case(
        "wall_clock", ("OFFSET",),
        """
        import time
        OFFSET = 0
        def set_up():
            global OFFSET
            OFFSET = time.time()  # <-
        set_up()
        def use():
            return torch.tensor([OFFSET])
        x = use()
        """,
    ),
    "class_body": Case("wall_clock", ("SCALE",), "import time\nclass C:\n    SCALE = time.time()  # <-\nx = torch.tensor([C.SCALE])\n"),
    "walrus_and_tuple": Case(
        "wall_clock", ("a", "b"),
        """
        import time
        a, b = time.time(), time.time_ns()  # <-
        x = torch.tensor([a + b])
        """,
    ),
    "file_that_grows": Case(
        "state_leak", ("text",),
        """
        with open(path, "a") as out:
            out.write("1")
        text = open(path).read()  # <-
        x = torch.tensor(len(text))
        """,
    ),
    "thread": Case(
        "outside_data", ("results",),
        """
        import threading
        results = []
        def work(i):
            pause(i)
            results.append(i)  # <-
        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for t in threads: t.start()
        for t in threads: t.join()
        x = torch.tensor(results)
        """,
        before="""
import itertools, time
turn = itertools.count()
def pause(i):
    n = next(turn) // 3
    time.sleep(0.02 * (i if n % 2 else 2 - i))
""",
    ),
    "decoy_branch_and_decoy_loop": Case(
        "os_entropy", ("key",),
        """
        import os, time
        for i in range(3):
            if time.perf_counter_ns() % 2:
                note = "odd"
            n = time.perf_counter_ns() % 7
            while n > 0:
                n -= 1
        key = os.urandom(6)  # <-
        x = torch.tensor(list(key))
        """, ("os.urandom",),
    ),
    "exception_in_one_run": Case(
        "control_flow", ("scale",),
        """
        scale = 1.0
        try:
            if next(flip):
                raise ValueError  # <-
            scale = 5.0  # <other
        except ValueError:
            pass
        x = torch.tensor([scale])
        """,
        before="import itertools\nflip = itertools.cycle([True, False])",
    ),
    "branch_on_the_clock": Case(
        "control_flow", ("scale",),
        """
        import time
        tick = next(flip) * 2 + time.time() * 0
        if tick > 1:
            scale = 2.0  # <-
        else:
            scale = 3.0  # <other
        x = torch.tensor([scale])
        """, ("time.time",),
        before="import itertools\nflip = itertools.cycle([True, False])",
    ),
    "early_return": Case(
        "control_flow", (),
        """
        def pick(flag):
            if flag:
                return 1.0  # <-
            return 2.0  # <other
        x = torch.tensor([pick(next(flip))])
        """,
        before="import itertools\nflip = itertools.cycle([True, False])",
    ),
    "unseeded_in_a_function_of_a_method_chain": Case(
        "numpy_random", ("rng",),
        """
        class Augment:
            def __call__(self, x):
                return self.jitter(x)

            def jitter(self, x):
                rng = np.random.default_rng()  # <-
                return x + torch.from_numpy(rng.normal(size=2))

        augment = Augment()
        for epoch in range(3):
            clean = torch.ones(2) * epoch
            x = augment(clean)
        """,
    ),
    "aliased_list": Case(
        "wall_clock", ("alias",),
        """
        import time
        store = {"values": []}
        alias = store["values"]
        alias.append(time.time())  # <-
        x = torch.tensor(store["values"])
        """,
    ),
    "augmented_in_a_loop": Case(
        "wall_clock", ("total",),
        """
        import time
        total = 0.0
        for i in range(4):
            total += i
        total += time.time()  # <-
        for i in range(4):
            total += i
        x = torch.tensor(total)
        """,
    ),
    "array_written_in_place": Case(
        "os_entropy", ("data",),
        """
        import os
        data = np.zeros(4)
        data[1:3] = list(os.urandom(2))  # <-
        data *= 2
        x = torch.from_numpy(data)
        """,
    ),
    "shuffled_in_place": Case(
        "numpy_random", ("rng",),
        """
        rng = np.random.default_rng()  # <-
        order = np.arange(1000)
        rng.shuffle(order)
        x = torch.from_numpy(order)
        """,
    ),
    "nan_is_nan": Case("wall_clock", ("b",), "import time\na = [float('nan'), -0.0]\nb = time.time()  # <-\nx = torch.tensor([*a, b])\n"),
    "async_function": Case(
        "wall_clock", ("a",),
        """
        import asyncio, time
        async def get():
            await asyncio.sleep(0)
            a = time.time()  # <-
            return a
        async def main():
            return await get()
        value = asyncio.run(main())
        x = torch.tensor([value])
        """,
    ),
    "named_tuple_and_unpacking": Case(
        "wall_clock", ("a",),
        """
        import time
        from typing import NamedTuple
        class Pair(NamedTuple):
            a: float
            b: float
        a = time.time()  # <-
        b = 1.0
        pair = Pair(a, b)
        first, second = pair
        x = torch.tensor([first, second])
        """,
    ),
    "context_manager": Case(
        "wall_clock", ("value",),
        """
        import contextlib, time
        @contextlib.contextmanager
        def given():
            t = time.time()
            value = time.perf_counter()  # <-
            yield value
            print(time.time() - t)
        with given() as v:
            x = torch.tensor([v])
        """,
    ),
    "recursion": Case(
        "wall_clock", ("leaf",),
        """
        import time
        def depth(n):
            if n == 0:
                leaf = time.time()  # <-
                return leaf
            return depth(n - 1) + 1
        x = torch.tensor([depth(5)])
        """,
    ),
    "sum_of_a_generator_expression": Case(
        "python_random", ("dice",),
        """
        dice = [random.Random() for _ in range(3)]  # <-
        total = sum(d.random() for d in dice)
        x = torch.tensor([total])
        """,
    ),
    "sorted_by_address": Case(
        "hash_order", ("order",),
        """
        things = [[i] for i in range(200)]
        order = [t[0] for t in sorted(things, key=id)]  # <-
        x = torch.tensor(order)
        """,
    ),
    "workers": Case(
        "worker_seed", (),
        """
        from torch.utils.data import DataLoader, Dataset

        class Noisy(Dataset):
            def __len__(self):
                return 2

            def __getitem__(self, index):
                return np.random.default_rng().random()

        loader = DataLoader(Noisy(), batch_size=2, num_workers=1)
        for batch in loader:  # <-
            x = batch * 2
        """,
    ),
    "sum_in_transform": Case(
        "wall_clock", ("x",),
        """
        import time
        class T:
            def __init__(self, p): self.p = p
            def __call__(self, x):
                if random.Random().random() < 2:
                    return x * time.time()  # <-
                return x
        class Compose:
            def __init__(self, ts): self.ts = ts
            def __call__(self, x):
                for t in self.ts:
                    x = t(x)
                return x
        tf = Compose([T(1), T(2)])
        x = torch.tensor(tf(1.0))
        """,
    ),
    "dict_iteration_over_set_derived": Case(
        "hash_order", ("d",),
        """
        class N: pass
        ns = [N() for _ in range(100)]
        for i, n in enumerate(ns): n.i = i
        d = {n: n.i for n in set(ns)}  # <-
        x = torch.tensor([v for k, v in d.items()])
        """,
    ),
    "randomly_sized_batch": Case(
        "os_entropy", ("k",),
        """
        import os
        k = os.urandom(1)[0] % 200 + 1  # <-
        data = list(range(1000))
        batch = data[:k]
        x = torch.tensor(batch) * 2
        """,
    ),
    "module_buffer": Case(
        "numpy_random", ("noise",),
        """
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                noise = np.random.default_rng().normal(size=3)  # <-
                self.register_buffer("noise", torch.from_numpy(noise))
            def forward(self, x):
                return x + self.noise
        net = Net()
        y = net(torch.ones(3))
        """,
    ),
    "numpy_global_unseeded": Case(
        "numpy_random", ("np.random",),
        """
        a = 1
        np.random.seed(None)  # <-
        a = np.random.rand(3)
        x = torch.tensor(a)
        """,
    ),
    "lr_schedule_from_time": Case(
        "wall_clock", ("opt",),
        """
        import time
        net = torch.nn.Linear(2,2)
        opt = torch.optim.SGD(net.parameters(), lr=time.time() % 1)  # <-
        for i in range(2):
            loss = net(torch.ones(1,2)).sum()
            opt.zero_grad()
            loss.backward()
            opt.step()
        """,
    ),
    "numpy_shuffle_in_place_of_list": Case(
        "numpy_random", ("xs",),
        """
        xs = list(range(50))
        np.random.default_rng().shuffle(xs)  # <-
        x = torch.tensor(xs)
        """,
    ),
    "sampler": Case(
        "numpy_random", ("order",),
        """
        from torch.utils.data import DataLoader, Sampler, TensorDataset
        class S(Sampler):
            def __init__(self, n):
                self.n = n
            def __iter__(self):
                order = np.random.default_rng().permutation(self.n)  # <-
                yield from order.tolist()
            def __len__(self): return self.n
        ds = TensorDataset(torch.arange(20.))
        for b, in DataLoader(ds, batch_size=4, sampler=S(20)):
            x = b * 2
        """,
    ),
    "collate_fn": Case(
        "wall_clock", ("jitter",),
        """
        import time
        from torch.utils.data import DataLoader
        def collate(items):
            jitter = time.perf_counter()  # <-
            return torch.tensor([i + jitter for i in items])
        for b in DataLoader(range(8), batch_size=4, collate_fn=collate):
            x = b * 2
        """,
    ),
    "user_dict_kwargs": Case(
        "wall_clock", ("opts",),
        """
        import time
        def make(**kw):
            return torch.tensor([kw["a"], kw["b"]])
        opts = dict(a=1.0, b=2.0)
        opts.update(b=time.time())  # <-
        x = make(**opts)
        """,
    ),
    "loader_generator": Case(
        "unseeded_generator", ("g",),
        """
        from torch.utils.data import DataLoader
        g = torch.Generator()
        g.seed()  # <-
        for b in DataLoader(range(8), batch_size=4, shuffle=True, generator=g):
            x = b * 2
        """,
    ),
    "slots_and_staticmethod": Case(
        "wall_clock", ("self.v",),
        """
        import time
        class A:
            __slots__ = ("v",)
            def __init__(self):
                self.v = self.get()
            @staticmethod
            def get():
                return time.time()  # <-
        a = A()
        x = torch.tensor([a.v])
        """,
    ),
    "partial_and_map": Case(
        "wall_clock", ("g",),
        """
        import functools, time
        def f(k, x):
            return x * k
        g = functools.partial(f, time.time())  # <-
        x = torch.tensor(list(map(g, [1, 2, 3])))
        """,
    ),
    "try_finally_log": Case(
        "numpy_random", ("a",),
        """
        import time
        t0 = time.time()
        try:
            a = np.random.default_rng().random()  # <-
        finally:
            print(time.time() - t0)
        x = torch.tensor([a])
        """,
    ),
    "one_line_loop": Case(
        "wall_clock", ("xs",),
        """
        import time
        xs = []
        for i in range(3): xs.append(time.time())  # <-
        x = torch.tensor(xs)
        """,
    ),
    "attr_chain": Case(
        "wall_clock", ("cfg.model.scale",),
        """
        import types, time
        cfg = types.SimpleNamespace(model=types.SimpleNamespace(scale=1.0), made=time.time())
        cfg.model.scale = time.perf_counter()  # <-
        x = torch.ones(2) * cfg.model.scale
        """,
    ),
    "functions_of_one_line": Case(
        "numpy_random", ("r",),
        """
        class Data:
            def __init__(self, r): self.r = r
            def __getitem__(self, i): return self.r.random(2)
        good = Data(np.random.default_rng(1))
        bad = Data(np.random.default_rng())  # <-
        for data in (good, bad):
            x = torch.from_numpy(data[0])
        """,
    ),
    "generator_as_an_argument": Case(
        "python_random", ("rng",),
        """
        class Jitter:
            def __init__(self, rng):
                self.rng = rng
            def __call__(self, x):
                return x * self.rng.uniform(0.5, 1.5)
        steps = [len, Jitter(random.Random())]  # <-
        x = torch.tensor(steps[1](2.0))
        """,
    ),
    "setting_of_a_layer": Case(
        "wall_clock", ("m",),
        """
        import time
        m = torch.nn.Sequential(torch.nn.Dropout(p=time.perf_counter() % 1))  # <-
        y = m(torch.ones(100))
        """,
    ),
    "rate_of_a_schedule": Case(
        "wall_clock", ("opt",),
        """
        import time
        net = torch.nn.Linear(3, 1)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: time.monotonic())  # <-
        net(torch.ones(2, 3)).sum().backward()
        opt.step()
        """,
    ),
    "exception_that_carries_it": Case(
        "wall_clock", ("e",),
        """
        import time
        try:
            raise ValueError(time.time())  # <-
        except ValueError as e:
            v = e.args[0]
        x = torch.tensor([v])
        """, ("time.time",),
    ),
    "memory_under_a_tensor": Case(
        "numpy_random", ("a",),
        """
        a = np.zeros(3)
        t = torch.from_numpy(a)
        u = t + 1
        a[:] = np.random.default_rng().random(3)  # <-
        v = t * 2
        """,
    ),
}  # fmt: skip
