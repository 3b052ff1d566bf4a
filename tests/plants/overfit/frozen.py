"""Weights that no step can move: frozen, unknown to the optimizer, or cut off from the loss."""

from __future__ import annotations

from tests.plants.overfit.training import MODEL_WITH_LOSS, planted

PLANTS = (
    planted(
        "cnn-of-which-one-bias-trains",
        "frozen",
        repair=(('name == "6.bias"', "True"),),
        parameters=("0.weight", "0.bias", "3.weight", "3.bias", "6.weight"),
    )("""
        model = cnn()
        for name, parameter in model.named_parameters():
            parameter.requires_grad = name == "6.bias"
        batch, loss_function, optimizer = pictures(), nn.CrossEntropyLoss(), adam(model)
    """),
    planted(
        "mlp-with-a-narrow-head-on-a-frozen-body",
        "frozen",
        repair=(("False", "True"),),
        parameters=("0.weight", "0.bias", "2.weight", "2.bias"),
    )("""
        model = mlp(10, 32, 2, 4)
        model[:3].requires_grad_(False)
        batch, loss_function, optimizer = classes(), nn.CrossEntropyLoss(), adam(model)
    """),
    planted(
        "gru-frozen-before-the-optimizer-filters",
        "frozen",
        repair=(
            ("embedding.requires_grad_(False", "embedding.requires_grad_(True"),
            ("rnn.requires_grad_(False", "rnn.requires_grad_(True"),
        ),
        parameters=("embedding.weight", "rnn.weight_ih_l0", "rnn.weight_hh_l0", "rnn.bias_ih_l0", "rnn.bias_hh_l0"),
    )("""
        model = Recurrent(nn.GRU, outputs=1, width=2)
        model.embedding.requires_grad_(False)
        model.rnn.requires_grad_(False)
        optimizer = torch.optim.Adam(filter(lambda p: p.requires_grad, model.parameters()), lr=5e-2)
        batch, loss_function = (words()[0], torch.tensor([[1.0], [-1.0]]).repeat(4, 1)), nn.MSELoss()
    """),
    planted("gpt2-of-which-the-last-norm-trains", "frozen", repair=(("False", "True"),), subjects=MODEL_WITH_LOSS)("""
        model = gpt2()
        model.requires_grad_(False)
        model.transformer.ln_f.requires_grad_(True)
        batch, optimizer = sentences(), adam(model, 5e-3)
    """),
    planted(
        "bert-whose-classifier-is-frozen-by-a-wrong-name",
        "frozen",
        repair=(('"fc" in name or name.endswith("pooler.dense.bias")', "True"),),
        subjects=MODEL_WITH_LOSS,
    )("""
        model = bert()
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "fc" in name or name.endswith("pooler.dense.bias")
        ids = torch.randint(0, 32, (8, 8))
        batch, optimizer = {"input_ids": ids, "labels": torch.arange(8) % 4}, adam(model, 1e-3)
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
        "model-copied-after-the-optimizer",
        "stale_optimizer",
        repair=(("model = copy.deepcopy(model)", ""), ("model = cnn()", "model = copy.deepcopy(cnn())")),
    )("""
        model = cnn()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model = copy.deepcopy(model)
        batch, loss_function = pictures(), nn.CrossEntropyLoss()
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
    planted(
        "weights-initialized-by-new-parameters",
        "stale_optimizer",
        repair=(
            (
                "batch, loss_function = (x, y)",
                "optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-3)\nbatch, loss_function = (x, y)",
            ),
        ),
        parameters=("0.weight", "2.weight"),
    )("""
        model = mlp(8, 24, 1, activation=nn.Tanh)
        for layer in model[::2]:
            layer.bias.requires_grad_(False)
        optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-3)
        for layer in model[::2]:
            layer.weight = nn.Parameter(nn.init.xavier_normal_(torch.empty_like(layer.weight)))
        x, y = torch.randn(8, 8), torch.randn(8, 1)
        batch, loss_function = (x, y), nn.MSELoss()
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
    planted("optimizer-has-the-embedding-alone", "stale_optimizer", repair=(("embedding.", ""),))("""
        model = Tagger(width=4)
        known = model.embedding.parameters()
        ids = torch.randint(0, 6, (8, 6))
        batch, loss_function, optimizer = (ids, ids.roll(1, 1) % 5), F.cross_entropy, torch.optim.Adam(known, lr=5e-2)
    """),
)
