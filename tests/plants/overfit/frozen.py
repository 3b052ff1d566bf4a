"""Weights that no step can move: frozen, unknown to the optimizer, or cut off from the loss."""

from __future__ import annotations

from tests.plants.overfit.training import MODEL_WITH_LOSS, planted

PLANTS = (
    planted("gpt2-of-which-the-last-norm-trains", "frozen", repair=(("False", "True"),), subjects=MODEL_WITH_LOSS)("""
        model = gpt2()
        model.requires_grad_(False)
        model.transformer.ln_f.requires_grad_(True)
        batch, optimizer = sentences(), adam(model, 5e-3)
    """),
    planted("only-the-biases-train", "frozen", repair=(('name.endswith("bias")', "True"),), parameters=("0.weight", "2.weight"))("""
        model = mlp(3, 6, 4)
        for name, parameter in model.named_parameters():
            parameter.requires_grad = name.endswith("bias")
        batch, loss_function, optimizer = classes(width=3), nn.CrossEntropyLoss(), adam(model, 5e-2)
    """),
    planted(
        "everything-is-frozen", "frozen", repair=(("False", "True"),), parameters=("0.weight", "0.bias", "2.weight", "2.bias"), raises=True
    )("""
        model = mlp(10, 32, 4).requires_grad_(False)
        batch, loss_function, optimizer = classes(), nn.CrossEntropyLoss(), adam(model)
    """),
    planted(
        "optimizer-of-the-model-of-an-earlier-cell",
        "stale_optimizer",
        repair=(("batch, loss_function =", "optimizer = adam(model)\nbatch, loss_function ="),),
        parameters=("0.weight", "0.bias", "2.weight", "2.bias"),
    )("""
        model = mlp(10, 32, 4)
        optimizer = adam(model)
        model = mlp(10, 32, 4)
        batch, loss_function = classes(), nn.CrossEntropyLoss()
    """),
    planted(
        "head-replaced-after-the-optimizer-over-a-frozen-body",
        ("stale_optimizer", "frozen"),
        repair=(("batch, loss_function =", "optimizer = adam(model, 5e-2)\nbatch, loss_function ="),),
        parameters=("2.weight", "2.bias"),
    )("""
        model = mlp(10, 32, 10)
        model[0].requires_grad_(False)
        optimizer = adam(model, 5e-2)
        model[2] = nn.Linear(32, 4)
        batch, loss_function = classes(), nn.CrossEntropyLoss()
    """),
    planted(
        "weights-parametrized-after-the-optimizer",
        "stale_optimizer",
        repair=(("batch, loss_function =", "optimizer = adam(model)\nbatch, loss_function ="),),
    )("""
        model = mlp(6, 24, 24, 1, activation=nn.Tanh)
        for layer in model[::2]:
            layer.bias = None
        optimizer = adam(model)
        for layer in model[::2]:
            parametrizations.weight_norm(layer)
        x = torch.randn(8, 6)
        batch, loss_function = (x, torch.randn(8, 1)), nn.MSELoss()
    """),
    planted("blocks-in-a-plain-list", ("stale_optimizer", "frozen"), repair=(("= blocks", "= nn.ModuleList(blocks)"),))("""
        class ListedBlocks(nn.Module):
            def __init__(self):
                super().__init__()
                blocks = [mlp(2, 32, 2, activation=nn.Tanh), nn.Linear(2, 4)]
                self.blocks = blocks
                self.scale = nn.Parameter(torch.ones(2))
            def forward(self, x):
                return self.blocks[1](self.blocks[0](x) * self.scale)
        model = ListedBlocks()
        batch, loss_function, optimizer = classes(4, 2), nn.CrossEntropyLoss(), adam(model, 5e-2)
    """),
)
