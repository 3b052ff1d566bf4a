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
