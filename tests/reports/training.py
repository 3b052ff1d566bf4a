"""Trainings whose loss does not fall: what people asked, and the cause that the answer named.

``cause`` is the slug of `%overfit`, None where none fits; in `test_training.py` plain torch confirms each stall and each repair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tests.reports.case import ReportCase

__all__ = ["CASES", "TrainingCase"]

_FIXES: Final = {
    "double_softmax": r"softmax",
    "wrong_loss_input": r"\w",
    "target_shape": r"squeeze|view|reshape|None|flatten",
    "stale_optimizer": r"optim|param",
    "frozen": r"requires_grad",
    "cut_graph": r"\w",
    "zero_grad_missing": r"zero_grad",
    "learning_rate": r"lr|learning",
    "reduction": r"mean|reduction|lr|\*|/",
    "input_scale": r"mean|std|norm|scale",
    "off_by_one_labels": r"[+-] ?1|blank",
    "dead_units": r"\w",
}


@dataclass(frozen=True, kw_only=True)
class TrainingCase(ReportCase):
    """The last cell is the magic alone, so that a plain training can take its place."""

    magic: str = "overfit"
    cause: str | tuple[str, ...] | None = None
    """Several where each change alone makes it learn, or two slugs name the same fault: the answer's own first."""

    @property
    def causes(self) -> tuple[str, ...]:
        return (self.cause,) if isinstance(self.cause, str) else self.cause or ()

    def __post_init__(self) -> None:
        if self.causes:
            object.__setattr__(self, "says", (rf"\bcause ({'|'.join(self.causes)})\b", *self.says))
            object.__setattr__(self, "fix", self.fix or _FIXES[self.causes[0]])
        object.__setattr__(self, "works", self.works or "r.passed")
        object.__setattr__(self, "line", any("# <-" in cell for cell in self.cells))
        super().__post_init__()


CASES: tuple[TrainingCase, ...] = (
    TrainingCase(
        name="softmax-in-logistic-regression",
        source="https://github.com/Lightning-Universe/lightning-bolts/issues/654",
        answer="The loss is a cross entropy of what was already softmaxed: give it the outputs of the linear layer.",
        cause="double_softmax",
        cells=(
            """
            torch.manual_seed(0)

            class LogisticRegression(nn.Module):
                def __init__(self, input_dim, num_classes):
                    super().__init__()
                    self.linear = nn.Linear(input_dim, num_classes)

                def forward(self, x):
                    x = self.linear(x)
                    y_hat = F.softmax(x, dim=1)  # <- here
                    return y_hat

            model = LogisticRegression(42, 5)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
            batch = torch.randn(8, 42), torch.arange(8) % 5
            """,
            "%overfit model batch F.cross_entropy optimizer -o r",
        ),
        fixed=(("y_hat = F.softmax(x, dim=1)", "y_hat = x"),),
    ),
    TrainingCase(
        name="softmax-over-the-candidates-of-a-question",
        source="https://github.com/bowang-lab/Transformer-GCN-QA/pull/32",
        answer="CrossEntropyLoss applies a softmax itself, so the one at the model's output is erroneous.",
        cause="double_softmax",
        cells=(
            """
            torch.manual_seed(0)

            class TransformerGCNQA(nn.Module):
                def __init__(self, dim=16):
                    super().__init__()
                    self.query, self.candidate = nn.Linear(dim, 32), nn.Linear(dim, 32)
                    self.fc = nn.Linear(32, 1)
                    self.softmax = nn.Softmax(dim=1)

                def forward(self, query, candidates):
                    x = torch.tanh(self.query(query).unsqueeze(1) + self.candidate(candidates))
                    logits = self.fc(x).squeeze(-1)
                    return self.softmax(logits)  # <- here

            model = TransformerGCNQA()
            criterion = nn.CrossEntropyLoss()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            batch = torch.randn(8, 16), torch.randn(8, 6, 16), torch.randint(0, 6, (8,))
            """,
            "%overfit model batch criterion optimizer -o r",
        ),
        fixed=(("return self.softmax(logits)", "return logits"),),
    ),
    TrainingCase(
        name="surnames-with-the-model-made-twice",
        source="https://github.com/spro/practical-pytorch/issues/9",
        answer="The model is instantiated a second time below the optimizer: make the optimizer behind the second one.",
        cause="stale_optimizer",
        cells=(
            """
            torch.manual_seed(0)
            n_letters, n_hidden, n_categories = 20, 64, 4

            class RNN(nn.Module):
                def __init__(self, input_size, hidden_size, output_size):
                    super().__init__()
                    self.hidden_size = hidden_size
                    self.i2h = nn.Linear(input_size + hidden_size, hidden_size)
                    self.i2o = nn.Linear(input_size + hidden_size, output_size)
                    self.softmax = nn.LogSoftmax(dim=1)

                def forward(self, line):
                    hidden = torch.zeros(len(line), self.hidden_size)
                    for letter in line.unbind(1):
                        combined = torch.cat((letter, hidden), 1)
                        hidden, output = self.i2h(combined), self.i2o(combined)
                    return self.softmax(output)

            rnn = RNN(n_letters, n_hidden, n_categories)
            criterion = nn.NLLLoss()
            optimizer = torch.optim.SGD(rnn.parameters(), lr=0.5)
            """,
            """
            rnn = RNN(n_letters, n_hidden, n_categories)
            batch = F.one_hot(torch.randint(0, n_letters, (8, 5)), n_letters).float(), torch.arange(8) % n_categories
            """,
            "%overfit rnn batch criterion optimizer -o r",
        ),
        fixed=(
            ("optimizer = torch.optim.SGD(rnn.parameters(), lr=0.5)\n", ""),
            ("batch = F", "optimizer = torch.optim.SGD(rnn.parameters(), lr=0.5)\nbatch = F"),
        ),
    ),
    TrainingCase(
        name="linear-regression-against-a-row",
        source="https://github.com/pytorch/pytorch/issues/16045",
        answer="The prediction is 100 x 1, the target 100, and the loss broadcasts them: reshape the target to a column.",
        cause="target_shape",
        cells=(
            """
            torch.manual_seed(0)
            sample_size = 100
            x = torch.randn((sample_size, 2))
            eps = torch.randn(sample_size)
            y = 10 + 9 * x[:, 0] - 2 * x[:, 1] + eps
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=.1)
            loss_func = nn.MSELoss()
            batch = x, y
            """,
            "%overfit model batch loss_func optimizer -o r",
        ),
        fixed=(("batch = x, y", "batch = x, y.reshape(sample_size, 1)"),),
    ),
    TrainingCase(
        name="sum-of-three-numbers",
        source="https://whosebug.com/question/6496401/Output-of-the-model-depends-on-the-shape-of-the-weights-tensor",
        answer="out is (1024, 1) and y (1024,), so that the error is a mean over 1024 x 1024: y.unsqueeze(-1).",
        cause="target_shape",
        cells=(
            """
            torch.manual_seed(0)
            X = torch.rand((1024, 3))
            y = (X[:, 0] + X[:, 1] + X[:, 2])
            m = nn.Sequential(nn.Linear(3, 1, bias=False))
            m[0].weight = torch.nn.parameter.Parameter(torch.tensor([[0, 0, 0]], dtype=torch.float))
            optim = torch.optim.SGD(m.parameters(), lr=10e-2)
            mse = torch.nn.MSELoss()
            y = y - y.mean()
            X = X - X.mean(0)
            batch = X, y
            """,
            "%overfit m batch mse optim -o r",
        ),
        fixed=(("batch = X, y", "batch = X, y.unsqueeze(-1)"),),
    ),
    TrainingCase(
        name="tabular-regression-with-a-squeezed-prediction",
        source="https://github.com/LAMDA-Tabular/TALENT/pull/92",
        answer="F.mse_loss of (n, 1) and (n,) compares all pairs: bring both to the same shape.",
        cause="target_shape",
        cells=(
            """
            torch.manual_seed(0)

            class MLP(nn.Module):
                def __init__(self, d_in, d_layers, d_out):
                    super().__init__()
                    self.layers = nn.ModuleList([nn.Linear(d_layers[i - 1] if i else d_in, x) for i, x in enumerate(d_layers)])
                    self.head = nn.Linear(d_layers[-1], d_out)

                def forward(self, x):
                    for layer in self.layers:
                        x = F.relu(layer(x))
                    logit = self.head(x)
                    return logit.squeeze(-1)

            model = MLP(8, [64, 64], 1)
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
            criterion = lambda y_pred, y_true: F.mse_loss(y_true, y_pred)
            batch = torch.randn(8, 8), torch.randn(8, 1)
            """,
            "%overfit model batch criterion optimizer -o r",
        ),
        fixed=(("batch = torch.randn(8, 8), torch.randn(8, 1)", "batch = torch.randn(8, 8), torch.randn(8, 1).squeeze(1)"),),
    ),
    TrainingCase(
        name="hidden-layers-in-a-list-of-lists",
        source="https://github.com/pytorch/pytorch/issues/715",
        answer="Modules in a Python list are not registered, so their parameters are not trained: nn.ModuleList.",
        cause=("stale_optimizer", "frozen"),
        cells=(
            """
            torch.manual_seed(0)

            class SNLINet(nn.Module):
                def __init__(self, n_in, n_hid, n_layers):
                    super().__init__()
                    self.hids = []
                    for li in range(n_layers):
                        self.hids.append([nn.Linear(n_in if li == 0 else n_hid, n_hid), nn.Tanh()])
                    self.classifier = nn.Linear(n_hid, 3)

                def forward(self, x):
                    for linear, act in self.hids:
                        x = act(linear(x))
                    return self.classifier(x)

            net = SNLINet(12, 2, 2)
            criterion = nn.CrossEntropyLoss()
            optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
            batch = torch.randn(8, 12), torch.arange(8) % 3
            """,
            "%overfit net batch criterion optimizer -o r",
        ),
        fixed=(
            ("self.hids = []", "self.hids = nn.ModuleList()"),
            (
                "self.hids.append([nn.Linear(n_in if li == 0 else n_hid, n_hid), nn.Tanh()])",
                "self.hids.append(nn.ModuleList([nn.Linear(n_in if li == 0 else n_hid, n_hid), nn.Tanh()]))",
            ),
        ),
    ),
    TrainingCase(
        name="voice-activity-without-zero-grad",
        source="https://github.com/snakers4/silero-vad/pull/699",
        answer="optimizer.zero_grad() is missing before loss.backward().",
        cause=("zero_grad_missing", "learning_rate"),
        cells=(
            """
            torch.manual_seed(0)

            class VADDecoderRNNJIT(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.rnn = nn.LSTMCell(16, 32)
                    self.decoder = nn.Sequential(nn.ReLU(), nn.Linear(32, 1))

                def forward(self, x):
                    h = c = torch.zeros(len(x), 32)
                    out = []
                    for frame in x.unbind(1):
                        h, c = self.rnn(frame, (h, c))
                        out.append(self.decoder(h))
                    return torch.cat(out, 1)

            decoder = VADDecoderRNNJIT()
            optimizer = torch.optim.SGD(decoder.parameters(), lr=2., momentum=0.9)
            criterion = nn.BCEWithLogitsLoss()
            x, targets = torch.randn(8, 6, 16), torch.randint(0, 2, (8, 6)).float()

            def train_step():
                stacked = decoder(x)
                loss = criterion(stacked, targets)
                loss.backward()
                optimizer.step()
                return loss
            """,
            "%overfit train_step -o r",
        ),
        fixed=(("    loss.backward()", "    optimizer.zero_grad()\n    loss.backward()"),),
    ),
    TrainingCase(
        name="keyword-spotting-without-zero-grad",
        source="https://github.com/wenet-e2e/wekws/pull/73",
        answer="The executor calls optimizer.step() and never optimizer.zero_grad(): add it above loss.backward().",
        cause=("zero_grad_missing", "learning_rate"),
        cells=(
            """
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 12))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            feats, target = torch.randn(8, 40), torch.arange(8)

            class Executor:
                def __init__(self):
                    self.step = 0

                def train(self):
                    model.train()
                    logits = model(feats)
                    loss = F.cross_entropy(logits, target)
                    loss.backward()
                    optimizer.step()
                    self.step += 1
                    return loss.item()

            executor = Executor()
            train = executor.train
            """,
            "%overfit train -o r",
        ),
        fixed=(("        loss.backward()", "        optimizer.zero_grad()\n        loss.backward()"),),
    ),
    TrainingCase(
        name="emoji-model-that-returns-data",
        source="https://github.com/huggingface/torchMoji/issues/21",
        answer="The model returns outputs.data, and Variable(loss, requires_grad=True) only hides the error: remove both.",
        cause="cut_graph",
        cells=(
            """
            torch.manual_seed(0)
            from torch.autograd import Variable

            class TorchMoji(nn.Module):
                def __init__(self, nb_classes, nb_tokens):
                    super().__init__()
                    self.embed = nn.Embedding(nb_tokens, 16)
                    self.lstm = nn.LSTM(16, 16, batch_first=True, bidirectional=True)
                    self.output_layer = nn.Linear(32, nb_classes)

                def forward(self, input_seqs):
                    x, _ = self.lstm(torch.tanh(self.embed(input_seqs)))
                    outputs = self.output_layer(x.mean(1))
                    outputs = outputs.data  # <- here
                    return outputs

            model = TorchMoji(2, 50)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

            def loss_op(outputs, labels):
                loss = F.cross_entropy(outputs, labels)
                loss = Variable(loss, requires_grad=True)  # <- here
                return loss

            batch = torch.randint(0, 50, (8, 10)), torch.arange(8) % 2
            """,
            "%overfit model batch loss_op optimizer -o r",
        ),
        fixed=(
            ("        outputs = outputs.data  # <- here\n", ""),
            ("    loss = Variable(loss, requires_grad=True)  # <- here\n", ""),
        ),
    ),
    TrainingCase(
        name="unet-with-a-sigmoid-under-its-logits-loss",
        source="https://github.com/avBuffer/UNet3plus_pth/issues/23",
        answer="The network returns F.sigmoid(d1), and the loss applies a sigmoid again: return d1.",
        cause="wrong_loss_input",
        cells=(
            """
            torch.manual_seed(0)

            class UNet3Plus(nn.Module):
                def __init__(self, n_channels=1, n_classes=1):
                    super().__init__()
                    self.conv1 = nn.Conv2d(n_channels, 8, 3, padding=1)
                    self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
                    self.conv1d = nn.Conv2d(24, 16, 3, padding=1)
                    self.outconv1 = nn.Conv2d(16, n_classes, 3, padding=1)

                def forward(self, inputs):
                    h1 = F.relu(self.conv1(inputs))
                    h2 = F.relu(self.conv2(F.max_pool2d(h1, 2)))
                    hd1 = F.relu(self.conv1d(torch.cat((h1, F.interpolate(h2, scale_factor=2)), 1)))
                    d1 = self.outconv1(hd1)
                    return torch.sigmoid(d1)  # <- here

            net = UNet3Plus()
            optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
            criterion = nn.BCEWithLogitsLoss()
            imgs = torch.randn(8, 1, 8, 8)
            batch = imgs, (F.avg_pool2d(imgs, 3, 1, 1) > 0).float()
            """,
            "%overfit net batch criterion optimizer -o r",
        ),
        fixed=(("return torch.sigmoid(d1)", "return d1"),),
    ),
    TrainingCase(
        name="recommender-with-a-sigmoid-under-its-logits-loss",
        source="https://github.com/yudi-mars/daisyRec/pull/15",
        answer="BCEWithLogitsLoss holds the sigmoid, and with another before it the loss does not converge.",
        cause="wrong_loss_input",
        cells=(
            """
            torch.manual_seed(0)

            class PointMF(nn.Module):
                def __init__(self, user_num, item_num, factors=16):
                    super().__init__()
                    self.embed_user, self.embed_item = nn.Embedding(user_num, factors), nn.Embedding(item_num, factors)
                    nn.init.normal_(self.embed_user.weight, std=0.3)
                    nn.init.normal_(self.embed_item.weight, std=0.3)

                def forward(self, user, item):
                    pred = (self.embed_user(user) * self.embed_item(item)).sum(dim=-1)
                    return torch.sigmoid(pred)  # <- here

            model = PointMF(20, 30)
            criterion = nn.BCEWithLogitsLoss()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
            batch = torch.arange(8), torch.randperm(30)[:8], torch.tensor([1., 0, 0, 1, 0, 1, 0, 0])
            """,
            "%overfit model batch criterion optimizer -o r",
        ),
        fixed=(("return torch.sigmoid(pred)", "return pred"),),
    ),
    TrainingCase(
        name="binary-output-block-with-the-logits-loss",
        source="https://github.com/NVIDIA-Merlin/models/pull/1175",
        answer="BinaryOutput ends in a sigmoid and its default loss applies one again: BCELoss.",
        cause="wrong_loss_input",
        cells=(
            """
            torch.manual_seed(0)

            class BinaryOutput(nn.Module):
                def __init__(self, width):
                    super().__init__()
                    self.to_call = nn.Sequential(nn.Linear(width, 1), nn.Sigmoid())
                    self.default_loss = nn.BCEWithLogitsLoss()

                def forward(self, x):
                    return self.to_call(x)

            model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), BinaryOutput(32))
            loss = model[-1].default_loss
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            batch = torch.randn(8, 12), torch.tensor([0., 1, 1, 0, 1, 0, 0, 1])[:, None]
            """,
            "%overfit model batch loss optimizer -o r",
        ),
        fixed=(("nn.BCEWithLogitsLoss()", "nn.BCELoss()"),),
    ),
    TrainingCase(
        name="point-net-with-nll-on-logits",
        source="https://github.com/yanx27/Pointnet_Pointnet2_pytorch/issues/30",
        answer="nll_loss is given what is not a log_softmax, so that it is negative: log_softmax before it, or cross_entropy.",
        cause="wrong_loss_input",
        cells=(
            """
            torch.manual_seed(0)

            class PointNetCls(nn.Module):
                def __init__(self, k=5):
                    super().__init__()
                    self.conv1, self.conv2 = nn.Conv1d(3, 16, 1), nn.Conv1d(16, 32, 1)
                    self.fc = nn.Linear(32, k)

                def forward(self, x):
                    x = F.relu(self.conv2(F.relu(self.conv1(x))))
                    return self.fc(torch.max(x, 2)[0])

            class PointNetLoss(nn.Module):
                def forward(self, labels_pred, label):
                    label_loss = F.nll_loss(labels_pred, label)
                    return label_loss

            model, criterion = PointNetCls(), PointNetLoss()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            batch = torch.randn(8, 3, 24), torch.arange(8) % 5
            """,
            "%overfit model batch criterion optimizer -o r",
        ),
        fixed=(("F.nll_loss(labels_pred, label)", "F.cross_entropy(labels_pred, label)"),),
    ),
    TrainingCase(
        name="auxiliary-classifier-with-softmax-and-nll",
        source="https://github.com/clvrai/ACGAN-PyTorch/pull/4",
        answer="NLLLoss needs log-probabilities: LogSoftmax in place of Softmax.",
        cause="wrong_loss_input",
        cells=(
            """
            torch.manual_seed(0)

            class NetD(nn.Module):
                def __init__(self, num_classes=10):
                    super().__init__()
                    self.conv1 = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.LeakyReLU(0.2))
                    self.conv2 = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1), nn.LeakyReLU(0.2))
                    self.fc_aux = nn.Linear(32 * 16, num_classes)
                    self.softmax = nn.Softmax(dim=1)

                def forward(self, input):
                    x = self.conv2(self.conv1(input))
                    return self.softmax(self.fc_aux(x.flatten(1)))

            netD = NetD()
            aux_criterion = nn.NLLLoss()
            optimizerD = torch.optim.Adam(netD.parameters(), lr=0.002, betas=(0.5, 0.999))
            batch = torch.randn(8, 3, 16, 16), torch.arange(8)
            """,
            "%overfit netD batch aux_criterion optimizerD -o r",
        ),
        fixed=(("nn.Softmax(dim=1)", "nn.LogSoftmax(dim=1)"),),
    ),
    TrainingCase(
        name="frozen-and-unfrozen-layers-exchanged",
        source="https://github.com/wannabeOG/MAS-PyTorch/issues/1",
        answer="The layers to freeze get requires_grad=True, and all others False: exchange them.",
        cause="frozen",
        cells=(
            """
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(20, 2), nn.Tanh(), nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 5))
            freeze_layers = ["0.bias"]

            def create_freeze_layers(model):
                for name, param in model.named_parameters():
                    if name not in freeze_layers:
                        param.requires_grad = False
                    else:
                        param.requires_grad = True
                return model

            model = create_freeze_layers(model)
            criterion = nn.CrossEntropyLoss()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
            batch = torch.randn(8, 20), torch.arange(8) % 5
            """,
            "%overfit model batch criterion optimizer -o r",
        ),
        fixed=(("if name not in freeze_layers", "if name in freeze_layers"),),
    ),
    TrainingCase(
        name="tracker-whose-rate-decays-for-each-sample",
        source="https://github.com/amoudgl/pygoturn/issues/16",
        answer="The scheduler runs for each sample of a batch, so that the rate falls many times: call it once a batch is done.",
        cause="learning_rate",
        cells=(
            """
            torch.manual_seed(0)
            lr, lr_decay_step, gamma, itr = 0.2, 3, 0.85, 0
            model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
            optimizer = torch.optim.SGD(model.parameters(), lr=lr)
            x, boxes = torch.randn(8, 16), torch.rand(8, 4)

            def exp_lr_scheduler(optimizer):
                global lr
                if itr > 0 and itr % lr_decay_step == 0:
                    lr *= gamma
                for group in optimizer.param_groups:
                    group["lr"] = lr

            def train():
                global itr
                optimizer.zero_grad()
                loss = 0.
                for sample in range(len(x)):
                    exp_lr_scheduler(optimizer)
                    loss = loss + F.l1_loss(model(x[sample]), boxes[sample]) / len(x)
                loss.backward()
                optimizer.step()
                itr += 1
                return loss
            """,
            "%overfit train -o r",
        ),
        defeated_by="no constant rate brings this absolute error near zero: it has to fall, and slowly",
        fixed=(
            ("        exp_lr_scheduler(optimizer)\n", ""),
            ("    itr += 1", "    itr += 1\n    exp_lr_scheduler(optimizer)"),
        ),
    ),
    TrainingCase(
        name="vessels-with-the-wrong-initial-rate",
        source="https://github.com/juntang-zhuang/LadderNet/issues/1",
        answer="The uploaded version had a wrong learning rate, and the loss explodes: 0.001.",
        cause="learning_rate",
        cells=(
            """
            torch.manual_seed(0)
            net = nn.Sequential(nn.Conv2d(1, 10, 3, padding=1), nn.ReLU(), nn.Conv2d(10, 10, 3, padding=1), nn.ReLU(), nn.Conv2d(10, 2, 1))
            optimizer = torch.optim.Adam(net.parameters(), lr=10.)
            criterion = nn.CrossEntropyLoss()
            x = torch.randn(8, 1, 12, 12)
            batch = x, (x[:, 0] > 0.5).long()
            """,
            "%overfit net batch criterion optimizer -o r",
        ),
        fixed=(("lr=10.", "lr=0.01"),),
    ),
    TrainingCase(
        name="segmentation-whose-loss-is-averaged-twice",
        source="https://github.com/jfzhang95/pytorch-deeplab-xception/issues/55",
        answer="The mean of the cross entropy is divided by the batch size again, and the loss is too small to converge.",
        cause=("reduction", "learning_rate"),
        cells=(
            """
            torch.manual_seed(0)

            class SegmentationLosses:
                def __init__(self, size_average=True, batch_average=True):
                    self.size_average, self.batch_average = size_average, batch_average

                def cross_entropy(self, logit, target):
                    n, c, h, w = logit.size()
                    criterion = nn.CrossEntropyLoss(reduction="mean" if self.size_average else "sum")
                    loss = criterion(logit, target.long())
                    if self.batch_average:
                        loss /= n
                    return loss

            model = nn.Sequential(nn.Conv2d(1, 32, 1), nn.ReLU(), nn.Conv2d(32, 32, 1), nn.ReLU(), nn.Conv2d(32, 2, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            criterion = SegmentationLosses().cross_entropy
            image = torch.randn(8, 1, 6, 6).sign() * torch.where(torch.rand(8, 1, 6, 6) > 0.5, 0.2, 1.5)
            batch = image, image[:, 0].abs() > 0.7
            """,
            "%overfit model batch criterion optimizer -o r",
        ),
        fixed=(("batch_average=True", "batch_average=False"),),
    ),
    TrainingCase(
        name="reconstruction-with-a-summed-error",
        source="https://github.com/utcsilab/deepinpy/issues/13",
        answer="MSELoss(reduction='sum') grows with the batch, and the gradient explodes: normalize it, or take a smaller step.",
        cause=("reduction", "learning_rate"),
        cells=(
            """
            torch.manual_seed(0)

            class Recon(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.denoiser = nn.Sequential(nn.Conv2d(2, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 2, 3, padding=1))
                    self._loss_fun = torch.nn.MSELoss(reduction="sum")

                def forward(self, inp):
                    return inp + self.denoiser(inp)

            model = Recon()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            loss_fun = model._loss_fun
            imgs = torch.randn(8, 2, 8, 8)
            batch = imgs.roll(1, 2), imgs
            """,
            "%overfit model batch loss_fun optimizer -o r",
        ),
        fixed=(('reduction="sum"', 'reduction="mean"'),),
    ),
    TrainingCase(
        name="sgd-by-hand-on-a-sum",
        source="https://github.com/ShusenTang/Dive-into-DL-PyTorch/issues/75",
        answer="With l.sum() as the loss, the update has to divide by the batch size; without it the gradients explode.",
        cause=("reduction", "learning_rate"),
        cells=(
            """
            torch.manual_seed(0)
            batch_size, lr = 16, 0.5
            X, y = 2 * torch.rand(batch_size, 64), torch.randint(0, 10, (batch_size,))
            W, b = torch.zeros(64, 10), torch.zeros(10)
            W.normal_(0, 0.01)
            params = [W.requires_grad_(), b.requires_grad_()]

            def net(X):
                return F.softmax(torch.mm(X, W) + b, dim=1)

            def cross_entropy(y_hat, y):
                return -torch.log(y_hat.gather(1, y.view(-1, 1)))

            def sgd(params, lr, batch_size):
                for param in params:
                    param.data -= lr * param.grad

            def step():
                for param in params:
                    param.grad = None
                l = cross_entropy(net(X), y).sum()
                l.backward()
                sgd(params, lr, batch_size)
                return l
            """,
            "%overfit step -o r",
        ),
        fixed=(("lr * param.grad", "lr * param.grad / batch_size"),),
    ),
    TrainingCase(
        name="heart-rates-that-are-not-standardized",
        source="https://openillumi.com/en/en-pytorch-performance-fix-standardization",
        answer="The inputs have a large mean, and the sigmoids saturate: standardize x_data, and a learning rate of 0.01.",
        cause="input_scale",
        cells=(
            """
            torch.manual_seed(0)

            class Model(nn.Module):
                def __init__(self, input_size, H1, output_size):
                    super().__init__()
                    self.linear = nn.Linear(input_size, H1)
                    self.linear2 = nn.Linear(H1, output_size)

                def forward(self, x):
                    x = torch.sigmoid(self.linear(x))
                    x = torch.sigmoid(self.linear2(x))
                    return x

            model = Model(2, 10, 1)
            criterion = nn.BCELoss()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            x_data = torch.randn(8, 2) * 15 + 1500
            y_data = (x_data[:, :1] > x_data[:, :1].median()).float()
            batch = x_data, y_data
            """,
            "%overfit model batch criterion optimizer -o r",
        ),
        fixed=(("batch = x_data", "batch = (x_data - x_data.mean(0)) / x_data.std(0)"),),
    ),
    TrainingCase(
        name="rnn-over-the-numbers-of-the-words",
        source="https://discuss.pytorch.org/t/what-it-means-when-model-is-unable-to-overfit-small-batch-of-examples-even-though-it-is-not-small/151285",
        answer="The gradient vanishes, as the raw indices saturate the tanh; it was resolved by batch normalization.",
        cause="input_scale",
        cells=(
            """
            torch.manual_seed(0)

            class RNN(nn.Module):
                def __init__(self, input_size=1, hidden_size=64, num_classes=4):
                    super().__init__()
                    self.rnn = nn.RNN(input_size, hidden_size, batch_first=True)
                    self.fc = nn.Linear(hidden_size, num_classes)

                def forward(self, x):
                    x = x.unsqueeze(-1)
                    _, h_n = self.rnn(x)
                    h_n = h_n.squeeze(0)
                    out = self.fc(h_n)
                    return out

            model = RNN()
            criterion = nn.CrossEntropyLoss()
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
            texts = torch.randint(1, 30000, (8, 12)).float()
            batch = texts, torch.arange(8) % 4
            """,
            "%overfit model batch criterion optimizer -o r",
        ),
        fixed=(("batch = texts", "batch = nn.BatchNorm1d(12)(texts).detach()"),),
    ),
    TrainingCase(
        name="masks-of-0-and-255",
        source="https://github.com/MontaEllis/Pytorch-Medical-Segmentation/issues/8",
        answer="BCEWithLogitsLoss is negative, since the labels of the png are not 0 and 1: normalize them when they are read.",
        cause="wrong_loss_input",
        cells=(
            """
            torch.manual_seed(0)
            model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 1))
            criterion = nn.BCEWithLogitsLoss()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
            source = torch.randn(8, 1, 8, 8)
            gt = (source > 0) * 255
            batch = source, gt.float()
            """,
            "%overfit model batch criterion optimizer -o r",
        ),
        fixed=(("gt.float()", "gt.float() / 255"),),
    ),
    TrainingCase(
        name="speech-labels-that-hold-the-blank",
        source="https://github.com/espnet/espnet/issues/700",
        answer="Label 0 means blank in the CTC loss, so it cannot be used in a target.",
        cause="off_by_one_labels",
        cells=(
            """
            torch.manual_seed(0)

            class CTC(nn.Module):
                def __init__(self, idim, odim):
                    super().__init__()
                    self.enc, self.ctc_lo = nn.GRU(idim, 32, batch_first=True), nn.Linear(32, odim)

                def forward(self, hs):
                    return self.ctc_lo(self.enc(hs)[0]).log_softmax(2).transpose(0, 1)

            model = CTC(10, 6)
            ctc_loss = torch.nn.CTCLoss(reduction="mean")
            np_target = torch.stack((torch.zeros(8), torch.randint(1, 5, (8,)), torch.zeros(8)), 1).long()
            criterion = lambda th_pred, th_target: ctc_loss(th_pred, th_target, torch.full((8,), 8), torch.full((8,), 3))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
            batch = torch.randn(8, 8, 10), np_target
            """,
            "%overfit model batch criterion optimizer -o r",
        ),
        fixed=(("batch = torch.randn(8, 8, 10), np_target", "batch = torch.randn(8, 8, 10), np_target + 1"),),
    ),
    TrainingCase(
        name="log-softmax-over-the-batch",
        source="https://github.com/MicrosoftDocs/pytorchfundamentals/pull/21",
        answer="The softmax has to go over the last dimension and not over the first.",
        cause="wrong_loss_input",
        cells=(
            """
            torch.manual_seed(0)
            net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10), nn.LogSoftmax(dim=0))
            loss_fn = nn.NLLLoss()
            optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
            batch = torch.randn(8, 1, 8, 8), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
            """,
            "%overfit net batch loss_fn optimizer -o r",
        ),
        fixed=(("nn.LogSoftmax(dim=0)", "nn.LogSoftmax(dim=-1)"),),
    ),
    TrainingCase(
        name="policy-gradient-with-softmax-over-the-batch",
        source="https://github.com/DeepReinforcementLearning/DeepReinforcementLearningInAction/issues/32",
        answer="Softmax(dim=0) is right for one state; for a batch of them it must be dim=1.",
        cause="wrong_loss_input",
        cells=(
            """
            torch.manual_seed(0)
            l1, l2, l3 = 4, 150, 2
            model = torch.nn.Sequential(
                torch.nn.Linear(l1, l2),
                torch.nn.LeakyReLU(),
                torch.nn.Linear(l2, l3),
                torch.nn.Softmax(dim=0)
            )
            optimizer = torch.optim.Adam(model.parameters(), lr=0.009)
            disc_returns = torch.linspace(1, 0.5, 8)

            def loss_fn(pred_batch, action_batch):
                prob_batch = pred_batch.gather(dim=1, index=action_batch.view(-1, 1)).squeeze()
                return -1 * torch.mean(disc_returns * torch.log(prob_batch))

            batch = torch.randn(8, 4), torch.arange(8) % 2
            """,
            "%overfit model batch loss_fn optimizer -o r",
        ),
        fixed=(("torch.nn.Softmax(dim=0)", "torch.nn.Softmax(dim=1)"),),
    ),
    TrainingCase(
        name="peptides-under-a-final-relu",
        source="https://github.com/ProteomicsML/ProteomicsML/pull/203",
        answer="With an unlucky initialization the last layer is negative everywhere and its ReLU passes no gradient: no ReLU at the end.",
        cause=("dead_units", "bad_init"),
        cells=(
            """
            torch.manual_seed(13)

            class LSTMModel(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.embedding = nn.Embedding(22, 16)
                    self.lstm = nn.LSTM(16, 32, batch_first=True)
                    self.linear = nn.Linear(32, 1)

                def forward(self, peptide):
                    _, (h, _) = self.lstm(self.embedding(peptide))
                    return F.relu(self.linear(h[-1]))  # <- here

            model = LSTMModel()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            criterion = nn.MSELoss()
            batch = torch.randint(0, 22, (8, 10)), torch.rand(8, 1) + 0.5
            """,
            "%overfit model batch criterion optimizer -o r",
        ),
        fixed=(("return F.relu(self.linear(h[-1]))", "return self.linear(h[-1])"),),
    ),
    TrainingCase(
        name="population-map-of-zeros",
        source="https://github.com/jvargasmu/population_estimation/issues/68",
        answer="The initial solution is zero everywhere, as the ReLU at the end passes no gradient: softplus.",
        cause=("dead_units", "bad_init"),
        cells=(
            """
            torch.manual_seed(56)

            class ScaleNet(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.params_with_regul = nn.Sequential(nn.Conv2d(3, 32, 1), nn.ReLU(), nn.Conv2d(32, 1, 1))

                def forward(self, inputs):
                    return F.relu(self.params_with_regul(inputs)).flatten(1).mean(1)  # <- here

            model = ScaleNet()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
            criterion = nn.MSELoss()
            batch = torch.randn(8, 3, 1, 1), torch.rand(8) * 2 + 0.2
            """,
            "%overfit model batch criterion optimizer -o r",
        ),
        fixed=(("F.relu(self.params_with_regul(inputs))", "F.softplus(self.params_with_regul(inputs))"),),
    ),
    TrainingCase(
        name="scheduler-steps-in-place-of-the-optimizer",
        source="https://github.com/ClementPinard/SfmLearner-Pytorch/issues/5",
        answer="scheduler.step() only changes the learning rate: optimizer.step() has to be called as well.",
        cause=None,
        cells=(
            """
            torch.manual_seed(0)
            disp_net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1))
            optimizer = torch.optim.Adam(disp_net.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
            tgt_img, depth = torch.randn(8, 3, 6, 6), torch.randn(8, 1, 1, 1).expand(-1, -1, 6, 6)

            def train():
                disparities = disp_net(tgt_img - tgt_img.mean() + depth)
                loss = F.l1_loss(disparities, depth)
                optimizer.zero_grad()
                loss.backward()
                if scheduler:
                    scheduler.step()
                else:
                    optimizer.step()
                return loss
            """,
            "%overfit train -o r",
        ),
        fix=r"optimizer\.step\(\)",
        fixed=(("        scheduler.step()\n    else:\n        optimizer.step()", "        scheduler.step()\n    optimizer.step()"),),
    ),
    TrainingCase(
        name="segmentation-whose-loss-stays",
        source="https://github.com/meetps/pytorch-semseg/issues/134",
        answer="Set a smaller learning rate.",
        cause="learning_rate",
        cells=(
            """
            torch.manual_seed(0)
            conv1, conv2 = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
            model = nn.Sequential(conv1, nn.ReLU(), conv2, nn.ReLU(), nn.Conv2d(16, 4, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=20., momentum=0.99, weight_decay=5e-4)
            loss_fn = nn.CrossEntropyLoss(ignore_index=250)
            images = torch.randn(8, 3, 8, 8)
            labels = images.argmax(1) + (images.amax(1) > 1.2)
            labels[:, 0] = 250
            batch = images, labels
            """,
            "%overfit model batch loss_fn optimizer -o r",
        ),
        fixed=(("lr=20., momentum=0.99", "lr=0.1, momentum=0.9"),),
    ),
)
