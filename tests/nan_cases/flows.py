"""The same few bugs inside every shape of training loop."""

from tests.nan_cases import slugs
from tests.nan_cases.case import ANY, Case, Expect

CASES = (
    Case(
        name="flow_next_inside_the_model_call",
        setup="""
            model = nn.Linear(3, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            stream = [torch.rand(4, 3) + 0.5 for _ in range(7)]
            stream[4][2] = 0.0
            model.bias.data.zero_()
            it = iter(stream)
        """,
        cell="""
            for step in range(7):
                out = model(next(it))
                loss = (out - model.bias).abs().sqrt().mean()  # <- here
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="backward", op="sqrt", module=None, step=4, rows=(2,), diagnosis=slugs.SQRT_ZERO),
    ),
    Case(
        name="flow_gan_generator_is_bad",
        setup="""
            G = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
            D = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1), nn.Sigmoid())
            opt_g, opt_d = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters())
            real = torch.randn(4, 2)
            noise = [torch.randn(4, 2) for _ in range(4)]
        """,
        cell="""
            for i, z in enumerate(noise):
                fake = G(z)
                d_loss = F.binary_cross_entropy(D(real), torch.ones(4, 1)) + F.binary_cross_entropy(D(fake.detach()), torch.zeros(4, 1))
                opt_d.zero_grad()
                d_loss.backward()
                opt_d.step()
                score = D(fake)
                if i == 2:
                    score = score * 0
                g_loss = -torch.log(score).mean()  # <- here
                opt_g.zero_grad()
                g_loss.backward()
                opt_g.step()
        """,
        truth=Expect(kind="inf", phase="loss", op="log", module=None, step=5, rows=(0, 1, 2, 3), diagnosis=slugs.LOG_ZERO),
    ),
    Case(
        name="flow_lbfgs_closure",
        setup="""
            model = nn.Linear(2, 1)
            opt = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
            x, y = torch.rand(6, 2), torch.rand(6, 1)
            calls = 0
        """,
        cell="""
            def closure():
                global calls
                calls += 1
                opt.zero_grad()
                out = model(x)
                if calls == 7:
                    out = out - out.detach()
                loss = (out - 0 * y).abs().pow(0.5).mean() if calls >= 7 else F.mse_loss(out, y)  # <- here
                loss.backward()
                return loss

            for _ in range(5):
                opt.step(closure)
        """,
        # 0 ** 0.5: the derivative of pow is infinite; the first closure calls belong to the first step.
        truth=Expect(
            kind="inf", phase="backward", op="pow", module=None, step=1, backward=6, rows=(0, 1, 2, 3, 4, 5), diagnosis=slugs.POW_ZERO
        ),
        pure=False,  # a step of many closures: where it began is not where the bad one did
    ),
    Case(
        name="flow_autograd_grad_with_a_bad_loss",
        setup="""
            model = nn.Linear(2, 2)
            opt = torch.optim.Adam(model.parameters())
            data = [torch.randn(3, 2).abs() + 1 for _ in range(4)]
            data[1][2, 0] = -4.0
        """,
        cell="""
            for x in data:
                root = model(x.sqrt())  # <- here
                loss = root.mean()
                grads = torch.autograd.grad(loss, tuple(model.parameters()))
                for p, g in zip(model.parameters(), grads):
                    p.grad = g
                opt.step()
        """,
        # Before the model call of the step: a replay from that call finds the data bad, one of the whole step finds sqrt.
        truth=Expect(
            kind="nan", phase=frozenset({"data", "loss"}), line=ANY, step=1, backward=frozenset({0, 1}), rows=(2,), reproduced=ANY
        ),
    ),
    Case(
        name="flow_compiled_eager_backend",
        setup="""
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin, self.out = nn.Linear(3, 3), nn.Linear(3, 1)
                def forward(self, x):
                    h = torch.relu(self.lin(x))
                    h = h / h.sum(-1, keepdim=True)  # <- here
                    return self.out(h)
            model = Net()
            with torch.no_grad():
                model.lin.weight.abs_(); model.lin.bias.fill_(-0.01)
            fast = torch.compile(model, backend="eager")
            opt = torch.optim.SGD(model.parameters(), lr=1e-3)
            data = [torch.rand(3, 3) + 1 for _ in range(4)]
            data[2][0] = 0.0
        """,
        cell="""
            for x in data:
                loss = fast(x).square().mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="forward", op="div", module="", step=2, rows=(0,), diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="flow_compiled_aot_eager_backend",
        setup="""
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(3, 3, bias=False)
                def forward(self, x):
                    return self.lin(x).square().sum(1).sqrt()  # <- here
            model = Net()
            fast = torch.compile(model, backend="aot_eager")
            opt = torch.optim.SGD(model.parameters(), lr=1e-3)
            data = [torch.rand(3, 3) + 1 for _ in range(3)]
            data[1][2] = 0.0
        """,
        cell="""
            for x in data:
                loss = fast(x).mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="backward", op="sqrt", module="", step=1, rows=(2,), diagnosis=slugs.SQRT_ZERO),
    ),
    Case(
        name="flow_compiled_submodule",
        setup="""
            class Tail(nn.Module):
                def forward(self, x):
                    return x.log1p()  # <- here
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin = nn.Linear(2, 2)
                    self.tail = Tail()
                def forward(self, x):
                    return self.tail(self.lin(x))
            model = Net()
            with torch.no_grad():
                model.lin.weight.copy_(torch.eye(2)); model.lin.bias.zero_()
            model.tail.compile(backend="eager")
            opt = torch.optim.SGD(model.parameters(), lr=1e-3)
            data = [torch.rand(3, 2) for _ in range(3)]
            data[2][1, 0] = -3.0
        """,
        cell="""
            for x in data:
                loss = model(x).mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="forward", op="log1p", module="tail", step=2, rows=(1,)),
    ),
    Case(
        name="flow_second_backward_of_a_step",
        setup="""
            model = nn.Linear(2, 2)
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            data = [torch.rand(3, 2) for _ in range(4)]
        """,
        cell="""
            for i, x in enumerate(data):
                opt.zero_grad()
                out = model(x)
                main = out.square().mean()
                main.backward(retain_graph=True)
                aux = (out[:, 0] - out[:, 0].detach() + (i != 2)).abs().sqrt().mean()  # <- here
                aux.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="backward", op="sqrt", module=None, step=2, backward=5, rows=(0, 1, 2), diagnosis=slugs.SQRT_ZERO),
    ),
    Case(
        name="flow_backward_with_a_given_gradient",
        setup="""
            model = nn.Linear(2, 2)
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            x = torch.rand(3, 2)
        """,
        cell="""
            for scale in (1.0, 2.0, 3.0):
                out = model(x)
                roots = (out - out.detach() * (scale == 3.0)).abs().sqrt()  # <- here
                opt.zero_grad()
                roots.backward(gradient=torch.full_like(roots, scale))
                opt.step()
        """,
        truth=Expect(kind="inf", phase="backward", op="sqrt", module=None, step=2, rows=(0, 1, 2), diagnosis=slugs.SQRT_ZERO),
    ),
    Case(
        name="flow_data_loader_with_shuffle",
        setup="""
            from torch.utils.data import DataLoader, TensorDataset
            features, target = torch.randn(12, 3), torch.randn(12, 1)
            features[7, 1] = float("nan")
            loader = DataLoader(TensorDataset(features, target), batch_size=4, shuffle=True)
            model = nn.Linear(3, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
        """,
        cell="""
            torch.manual_seed(3)
            for x, y in loader:
                loss = F.mse_loss(model(x), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="data", op=None, step=1, rows=(3,), tensor=frozenset({"x", "input"}), diagnosis=slugs.BAD_ROW),
    ),
    Case(
        name="flow_keep_going_counts_every_bad_step",
        setup="""
            model = nn.Linear(2, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.0)
            data = [torch.rand(3, 2) for _ in range(5)]
            data[1][0] = float("nan"); data[3][2] = float("nan")
        """,
        options={"keep_going": True},
        cell="""
            for x in data:
                out = model(x)
                loss = out.square().mean()
                opt.zero_grad()
                loss.backward()
                if torch.isfinite(loss):
                    opt.step()
        """,
        truth=Expect(
            kind="nan",
            phase="data",
            op=None,
            step=1,
            rows=(0,),
            tensor=frozenset({"x", "input"}),
            diagnosis=slugs.BAD_ROW,
            count=1,
            bad_steps=(1, 2),
        ),
    ),
    Case(
        name="flow_two_models_called_in_one_step",
        setup="""
            class Decoder(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.up = nn.Linear(2, 3)
                def forward(self, z):
                    return torch.exp(self.up(z) * 100)  # <- here
            encoder, decoder = nn.Linear(3, 2), Decoder()
            opt = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=1e-6)
            with torch.no_grad():
                decoder.up.weight.fill_(1.0); decoder.up.bias.zero_(); encoder.weight.fill_(1.0); encoder.bias.zero_()
            data = [torch.rand(2, 3) * 0.01 for _ in range(4)]
            data[3][1] = 1.0
        """,
        cell="""
            for x in data:
                z = encoder(x)
                reconstruction = decoder(z)
                loss = F.mse_loss(reconstruction, x)
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="inf", phase="forward", op="exp", module="", step=3, rows=(1,)),
    ),
    Case(
        name="flow_while_loop_with_noise_and_early_stop",
        setup="""
            import numpy as np
            np.random.seed(0)
            model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            step = 0
        """,
        cell="""
            while True:
                x = torch.randn(3, 2)
                out = model(x + torch.from_numpy(np.random.randn(3, 2)).float())
                jitter = random.random() + float(np.random.rand()) + torch.rand(()).item()
                loss = (out * jitter).square().mean()
                if step == 6:
                    loss = torch.log(loss - loss.detach() - 1)  # <- here
                opt.zero_grad()
                loss.backward()
                opt.step()
                step += 1
                if step == 10:
                    break
        """,
        truth=Expect(kind="nan", phase="loss", op="log", module=None, step=6, rows=()),
    ),
    Case(
        name="flow_user_swallows_every_exception",
        setup="""
            model = nn.Linear(2, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            data = [torch.rand(3, 2) for _ in range(4)]
            data[2][1] = float("inf")
        """,
        options={"keep_going": True},
        cell="""
            for x in data:
                try:
                    loss = model(x).square().mean()
                    opt.zero_grad()
                    loss.backward()
                    if not math.isfinite(loss.item()):
                        raise ValueError("bad loss")
                    opt.step()
                except Exception:
                    opt.zero_grad()
        """,
        truth=Expect(kind="inf", phase="data", op=None, step=2, rows=(1,), diagnosis=slugs.BAD_ROW),
    ),
    Case(
        name="flow_ema_teacher_is_poisoned",
        setup="""
            import copy
            student = nn.Linear(2, 2)
            teacher = copy.deepcopy(student).requires_grad_(False)
            opt = torch.optim.SGD(student.parameters(), lr=0.01)
            x = torch.randn(4, 2)
            decay = [0.9, 0.9, float("nan"), 0.9, 0.9]
        """,
        cell="""
            for d in decay:
                with torch.no_grad():
                    goal = teacher(x)
                loss = F.mse_loss(student(x), goal)
                opt.zero_grad()
                loss.backward()
                opt.step()
                with torch.no_grad():
                    for a, b in zip(teacher.parameters(), student.parameters()):
                        a.mul_(d).add_(b, alpha=1 - d)
        """,
        # Poisoned after step 2, met by the teacher's forward of step 3.
        truth=Expect(
            kind="nan",
            phase=frozenset({"parameter", "optimizer"}),
            line=ANY,
            step=3,
            rows=(0, 1),
            tensor=frozenset({"weight", "bias", "teacher.weight", "teacher.bias"}),
        ),
    ),
)
