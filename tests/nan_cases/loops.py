"""Loops that are awkward to cut a step out of."""

from tests.nan_cases import slugs
from tests.nan_cases.case import ANY, Case, Expect, Nothing, Problem

_DATA = """
    model = nn.Linear(2, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    data = [torch.rand(3, 2) for _ in range(5)]
"""

CASES = (
    Case(
        name="loop_model_called_in_a_condition",
        setup=_DATA,
        cell="""
            for i, x in enumerate(data):
                if (out := model(x)).numel() == 3:
                    target = x.sum(1, keepdim=True) * float(i != 2)
                    loss = (out / target).square().mean()  # <- here
                    opt.zero_grad()
                    loss.backward()
                    opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="div", module=None, step=2, rows=(0, 1, 2), diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="loop_helper_calls_backward_in_a_file",
        files={
            "accelerator_file.py": """
                class Accelerator:
                    def __init__(self):
                        self.count = 0

                    def backward(self, loss, **kwargs):
                        self.count += 1
                        loss.backward(**kwargs)
            """,
        },
        setup=_DATA
        + """
    from accelerator_file import Accelerator
    accelerator = Accelerator()
""",
        cell="""
            for i, x in enumerate(data):
                out = model(x)
                loss = (out - out.detach() * float(i == 1)).abs().sqrt().sum()  # <- here
                opt.zero_grad()
                accelerator.backward(loss)
                opt.step()
        """,
        truth=Expect(kind="inf", phase="backward", op="sqrt", module=None, step=1, rows=(0, 1, 2), diagnosis=slugs.SQRT_ZERO),
    ),
    Case(
        name="loop_backward_one_iteration_late",
        setup=_DATA,
        cell="""
            pending = None
            for i, x in enumerate(data):
                if pending is not None:
                    opt.zero_grad()
                    pending.backward()
                    opt.step()
                out = model(x)
                pending = torch.log(out.abs() * float(i != 2)).mean()
        """,
        # The weights have moved between the model call and its backward, and the statements are in the other order.
        truth=Problem(kind="inf", phase="loss", op="log", step=frozenset({1, 2})),
        pure=False,
    ),
    Case(
        name="loop_losses_first_backwards_after",
        setup=_DATA,
        cell="""
            losses = []
            for i, x in enumerate(data):
                out = model(x)
                losses.append(torch.log(out.abs() * float(i != 2)).mean())
            opt.zero_grad()
            for loss in losses:
                loss.backward()
            opt.step()
        """,
        truth=Problem(kind="inf", phase="loss", op="log", step=0),
    ),
    Case(
        name="loop_recursion_over_a_tree",
        setup="""
            class Tree(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.leaf, self.merge = nn.Linear(2, 2), nn.Linear(4, 2)
                def forward(self, node):
                    if isinstance(node, torch.Tensor):
                        return self.leaf(node)
                    left, right = (self(child) for child in node)
                    merged = self.merge(torch.cat([left, right], -1))
                    return merged / node_scale[len(node_scale) - depth(node)]  # <- here
            def depth(node):
                return 0 if isinstance(node, torch.Tensor) else 1 + max(map(depth, node))
            node_scale = [0.0, 1.0, 1.0]
            model = Tree()
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            leaf = lambda: torch.rand(1, 2)
            tree = (((leaf(), leaf()), leaf()), (leaf(), leaf()))
        """,
        cell="""
            loss = model(tree).sum()
            loss.backward()
            opt.step()
        """,
        # Calls are counted as they begin: the outermost is the first, and the one that divides by 0.
        truth=Expect(kind="inf", phase="forward", op="div", module="", call=1, rows=(0,), diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="loop_hostile_objects_in_the_namespace",
        setup=_DATA
        + """
    import weakref
    class Hostile:
        def __getattr__(self, name): raise RuntimeError("do not touch")
        def __eq__(self, other): raise RuntimeError("do not compare")
        def __bool__(self): raise RuntimeError("do not ask")
        def __len__(self): raise RuntimeError("do not count")
        def __iter__(self): raise RuntimeError("do not walk")
        def __repr__(self): raise RuntimeError("do not show")
        __hash__ = None
        @property
        def __class__(self): raise RuntimeError("do not look")
    class Thing: pass
    thing = Thing()
    dead, hostile = weakref.proxy(thing), Hostile()
    del thing
""",
        cell="""
            def step(x, i, other=hostile):
                mine = hostile
                out = model(x)
                loss = torch.log(out.abs() * float(i != 1)).mean()  # <- here
                opt.zero_grad()
                loss.backward()
                opt.step()

            for i, x in enumerate(data):
                step(x, i)
        """,
        truth=Expect(kind="inf", phase="loss", op="log", module=None, step=1, rows=(0, 1, 2), diagnosis=slugs.LOG_ZERO),
    ),
    Case(
        name="loop_prints_in_the_step",
        setup=_DATA,
        cell="""
            seen = []
            for i, x in enumerate(data):
                out = model(x)
                print("step", i)
                seen.append(i)
                loss = torch.log(out.abs() * float(i != 2)).mean()  # <- here
                print("loss made", flush=True)
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        # What a replay prints or appends again must not be seen.
        truth=Expect(kind="inf", phase="loss", op="log", module=None, step=2, rows=(0, 1, 2), diagnosis=slugs.LOG_ZERO),
    ),
    Case(
        name="loop_writes_a_file_in_the_step",
        setup=_DATA
        + """
    import io
    log = io.StringIO()
""",
        cell="""
            for i, x in enumerate(data):
                out = model(x)
                log.write(f"{i};")
                loss = torch.log(out.abs() * float(i != 2)).mean()  # <- here
                opt.zero_grad()
                loss.backward()
                opt.step()
            lines = log.getvalue()
        """,
        truth=Expect(kind="inf", phase="loss", op="log", module=None, step=2, rows=(0, 1, 2), diagnosis=slugs.LOG_ZERO, reproduced=ANY),
    ),
    Case(
        name="loop_list_of_tensors_backward",
        setup=_DATA,
        cell="""
            for i, x in enumerate(data):
                out = model(x)
                first = out.square().mean()
                second = (out - out.detach() + float(i != 2)).abs().sqrt().mean()  # <- here
                opt.zero_grad()
                torch.autograd.backward([first, second])
                opt.step()
        """,
        truth=Expect(kind="inf", phase="backward", op="sqrt", module=None, step=2, rows=(0, 1, 2), diagnosis=slugs.SQRT_ZERO),
    ),
    Case(
        name="loop_statement_over_several_lines",
        setup=_DATA,
        cell="""
            for i, x in enumerate(data):
                out = model(x)
                loss = (
                    out.square().mean()
                    + out.abs().mean()
                    + torch.log(  # <- here
                        (out * float(i != 1)).abs()
                    ).mean() * 0.1
                )
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="log", module=None, step=1, rows=(0, 1, 2), diagnosis=slugs.LOG_ZERO),
    ),
    Case(
        name="loop_two_steps_of_one_batch",
        setup="""
            actor, critic = nn.Linear(2, 2), nn.Linear(2, 1)
            opt_a, opt_c = torch.optim.Adam(actor.parameters()), torch.optim.Adam(critic.parameters())
            states = [torch.rand(4, 2) for _ in range(3)]
        """,
        cell="""
            for t, state in enumerate(states):
                value = critic(state).squeeze(1)
                returns = torch.rand(4)
                advantage = (returns - value).detach()
                if t == 1:
                    advantage = advantage - advantage
                advantage = (advantage - advantage.mean()) / advantage.std()  # <- here
                critic_loss = F.mse_loss(value, returns)
                opt_c.zero_grad()
                critic_loss.backward()
                opt_c.step()
                log_p = F.log_softmax(actor(state), -1)
                actor_loss = -(log_p[:, 0] * advantage).mean()
                opt_a.zero_grad()
                actor_loss.backward()
                opt_a.step()
        """,
        # Born in the critic's half of the step, met by the actor's backward, after the critic's own step.
        truth=Expect(
            kind="nan",
            phase=frozenset({"loss", "data"}),
            line=ANY,
            step=3,
            rows=(0, 1, 2, 3),
            reproduced=ANY,
        ),
    ),
    Case(
        name="loop_gradients_read_between_backwards",
        setup=_DATA,
        cell="""
            for i, x in enumerate(data):
                opt.zero_grad()
                a = model(x).square().mean()
                a.backward()
                norm = sum(p.grad.norm() for p in model.parameters())
                b = (model(x).mean() / norm) * (0.0 if i != 2 else float("inf"))  # <- here
                b.backward()
                opt.step()
        """,
        # A python infinity multiplied in: mul by a scalar.
        truth=Expect(kind="inf", phase="loss", op="mul", module=None, step=2, backward=5, rows=()),
    ),
    Case(
        name="loop_keep_going_with_a_limit",
        setup=_DATA,
        options={"keep_going": True, "max_findings": 1},
        cell="""
            for i, x in enumerate(data):
                out = model(x)
                loss = torch.log(out.abs() * float(i not in {1, 3})).mean()  # <- here
                opt.zero_grad()
                loss.backward()
                if math.isfinite(loss.item()):
                    opt.step()
        """,
        truth=Expect(
            kind="inf", phase="loss", op="log", module=None, step=1, rows=(0, 1, 2), diagnosis=slugs.LOG_ZERO, count=1, bad_steps=(1,)
        ),
    ),
    Case(
        name="loop_keep_going_finds_both",
        setup=_DATA,
        options={"keep_going": True},
        cell="""
            for i, x in enumerate(data):
                out = model(x)
                loss = torch.log(out.abs() * float(i not in {1, 3})).mean()  # <- here
                opt.zero_grad()
                loss.backward()
                if math.isfinite(loss.item()):
                    opt.step()
        """,
        truth=Expect(
            kind="inf", phase="loss", op="log", module=None, step=1, rows=(0, 1, 2), diagnosis=slugs.LOG_ZERO, count=1, bad_steps=(1, 2)
        ),
    ),
    Case(
        name="loop_error_if_nonfinite",
        setup="""
            model = nn.Linear(2, 1, bias=False)
            opt = torch.optim.SGD(model.parameters(), lr=0.0)
            x = torch.full((3, 2), 1e10)
        """,
        cell="""
            for _ in range(3):
                loss = (model(x) * 1e20).sum()
                opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
                opt.step()
        """,
        # Every gradient is finite; their L2 norm is not: the user's own exception.
        truth=Nothing(raises="RuntimeError", steps=0, backwards=1),
    ),
)
