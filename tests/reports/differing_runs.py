"""Runs that gave other numbers after a restart, at a second execution or since an edit: what people asked, and what it was."""

from __future__ import annotations

from tests.reports.case import ReportCase

CASES: tuple[ReportCase, ...] = (
    # --- a generator that nothing of the user's has seeded ------------------------------------------------------------------------
    ReportCase(
        name="only NumPy is seeded",
        source="https://github.com/ourownstory/neural_prophet/issues/147",
        answer="np.random.seed says nothing to torch, which draws the initial weights and the order of the batches: torch.manual_seed(0).",
        magic="deterministic",
        cells=(
            """
            np.random.seed(0)
            t = np.arange(365, dtype=np.float32)
            y = 10 + 0.02 * t + 2 * np.sin(2 * np.pi * t / 7) + np.random.normal(0, 0.3, 365)

            class TimeNet(nn.Module):
                def __init__(self, n_changepoints=10, n_fourier=3):
                    super().__init__()
                    self.trend_m0 = nn.Parameter(torch.randn(1))  # <- here
                    self.trend_k0 = nn.Parameter(torch.randn(1))  # <- here
                    self.trend_deltas = nn.Parameter(torch.randn(1, n_changepoints))  # <- here
                    self.season = nn.Linear(2 * n_fourier, 1, bias=False)  # <- here
                    self.register_buffer("changepoints", torch.linspace(0, 0.9, n_changepoints))
                    self.n_fourier = n_fourier

                def forward(self, t):
                    bend = F.relu(t - self.changepoints) @ self.trend_deltas.T
                    angles = 2 * math.pi * t * 52 * torch.arange(1, self.n_fourier + 1)
                    waves = torch.cat([angles.sin(), angles.cos()], dim=1)
                    return self.trend_m0 + self.trend_k0 * t + bend + self.season(waves)
            """,
            """
            %%deterministic --verify -o r
            np.random.seed(0)
            m = TimeNet()  # <- here
            data = TensorDataset(torch.tensor(t / 365).unsqueeze(1), torch.tensor((y - y.mean()) / y.std()).float().unsqueeze(1))
            loader = DataLoader(data, batch_size=64, shuffle=True)
            optimizer = torch.optim.AdamW(m.parameters(), lr=0.05)
            for epoch in range(3):
                for ds, target in loader:  # <- here
                    optimizer.zero_grad()
                    loss = F.huber_loss(m(ds), target)
                    loss.backward()
                    optimizer.step()
            """,
        ),
        op=("randn", "normal_", "uniform_", "randperm"),
        says=("seed",),
        fix=r"manual_seed",
        fixed=(("np.random.seed(0)\nm = TimeNet()", "np.random.seed(0)\ntorch.manual_seed(0)\nm = TimeNet()"),),
        works="bool(torch.isfinite(loss))",
    ),
    ReportCase(
        name="another validation split on resuming",
        source="https://github.com/talmolab/sleap-nn/pull/600",
        answer="The split is drawn anew at each start, so that after a resume training images are in the validation set: seed it.",
        magic="deterministic",
        cells=(
            """
            frames = torch.rand(120, 1, 24, 24, generator=torch.Generator().manual_seed(1))
            points = torch.rand(120, 4, generator=torch.Generator().manual_seed(2))

            class SingleInstanceModel(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.backbone = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU())
                    self.head = nn.Linear(8 * 5 * 5, 4)

                def forward(self, x):
                    return self.head(self.backbone(x).flatten(1))

            torch.save({"state_dict": SingleInstanceModel().state_dict(), "epoch": 7}, "best.ckpt")
            """,
            """
            %%deterministic --verify -o r
            labels = TensorDataset(frames, points)
            train_labels, val_labels = torch.utils.data.random_split(labels, [0.9, 0.1])  # <- here
            ckpt = torch.load("best.ckpt")
            model = SingleInstanceModel()
            model.load_state_dict(ckpt["state_dict"])
            model.eval()
            val_loss = 0.0
            with torch.no_grad():
                for image, instance in DataLoader(val_labels, batch_size=4):
                    val_loss += F.mse_loss(model(image), instance).item()
            """,
        ),
        op=("randperm",),
        says=("seed",),
        fix=r"manual_seed|generator=",
        fixed=(("(labels, [0.9, 0.1])", "(labels, [0.9, 0.1], generator=torch.Generator().manual_seed(42))"),),
        works="val_loss > 0 and len(val_labels) == 12",
    ),
    ReportCase(
        name="orientation differs for one image",
        source="https://github.com/skhadem/3D-BoundingBox/issues/29",
        answer="The model is not in eval() mode, so that dropout still occurs.",
        magic="deterministic",
        cells=(
            """
            torch.manual_seed(5)

            class Model(nn.Module):
                def __init__(self, features, bins=2, w=0.4):
                    super().__init__()
                    self.bins = bins
                    self.features = features
                    self.orientation = nn.Sequential(
                        nn.Linear(64 * 7 * 7, 64), nn.ReLU(True), nn.Dropout(), nn.Linear(64, 64), nn.ReLU(True), nn.Dropout(),
                        nn.Linear(64, bins * 2),
                    )
                    self.confidence = nn.Sequential(nn.Linear(64 * 7 * 7, 64), nn.ReLU(True), nn.Dropout(), nn.Linear(64, bins))
                    self.dimension = nn.Sequential(nn.Linear(64 * 7 * 7, 64), nn.ReLU(True), nn.Dropout(), nn.Linear(64, 3))

                def forward(self, x):
                    x = self.features(x)
                    x = x.view(-1, 64 * 7 * 7)
                    orientation = self.orientation(x)  # <- here
                    orientation = orientation.view(-1, self.bins, 2)
                    orientation = F.normalize(orientation, dim=2)
                    confidence = self.confidence(x)  # <- here
                    dimension = self.dimension(x)  # <- here
                    return orientation, confidence, dimension

            vgg = nn.Sequential(nn.Conv2d(3, 64, 3, stride=4, padding=1), nn.ReLU(True), nn.MaxPool2d(2), nn.MaxPool2d(4))
            model = Model(vgg)
            img = torch.rand(1, 3, 224, 224)
            """,
            """
            %%deterministic --verify -o r
            input_tensor = (img - 0.45) / 0.22
            with torch.no_grad():
                orient, conf, dim = model(input_tensor)  # <- here
            argmax = conf[0].argmax().item()
            alpha = math.atan2(orient[0, argmax, 1].item(), orient[0, argmax, 0].item())
            """,
        ),
        op=("dropout", "native_dropout", "bernoulli_"),
        says=("dropout",),
        fix=r"\.eval\(\)",
        fixed=(("with torch.no_grad():\n", "model.eval()\nwith torch.no_grad():\n"),),
        works="-math.pi <= alpha <= math.pi and not model.training",
    ),
    ReportCase(
        name="functional dropout in evaluation",
        source="https://github.com/Coderx7/SimpleNet/issues/2",
        answer="F.dropout2d is called with training=True, so that eval() does not end it; use nn.Dropout or training=self.training.",
        magic="deterministic",
        cells=(
            """
            torch.manual_seed(11)

            class SimpleNet(nn.Module):
                def __init__(self, classes=10):
                    super().__init__()
                    self.features = self._make_layers()
                    self.classifier = nn.Linear(32, classes)

                def forward(self, x):
                    out = self.features(x)
                    out = F.max_pool2d(out, kernel_size=out.size()[2:])
                    out = F.dropout2d(out, 0.1, training=True)  # <- here
                    out = out.view(out.size(0), -1)
                    return self.classifier(out)

                def _make_layers(self):
                    return nn.Sequential(
                        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16, eps=1e-05, momentum=0.05), nn.ReLU(inplace=True),
                        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32, eps=1e-05, momentum=0.05), nn.ReLU(inplace=True),
                    )

            net = SimpleNet()
            net.eval()
            example = torch.rand(1, 3, 32, 32)
            """,
            """
            %%deterministic --verify -o r
            with torch.no_grad():
                scores = net(example)  # <- here
            """,
        ),
        op=("dropout2d", "feature_dropout", "bernoulli_", "dropout"),
        says=("dropout",),
        never=(r"net\.eval\(\)",),
        fix=r"self\.training|nn\.Dropout",
        fixed=(("F.dropout2d(out, 0.1, training=True)", "F.dropout2d(out, 0.1, training=self.training)"),),
        works="scores.shape == (1, 10)",
    ),
    ReportCase(
        name="GPT-2 gives another hidden state each time",
        source="https://github.com/huggingface/transformers/issues/2627",
        answer="The model is not in evaluation mode, so dropout is active: best_model.eval() before the vector is taken.",
        magic="deterministic",
        cells=(
            """
            from transformers import GPT2Config, GPT2Model
            torch.manual_seed(3)
            best_model = GPT2Model(GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=500, output_hidden_states=True))
            best_model.train()
            test_i = torch.arange(2, 42).reshape(20, 2)
            """,
            """
            %%deterministic --verify -o r
            input_ids = test_i[:, 0]
            input_ids = torch.tensor(input_ids.tolist()).unsqueeze(0)
            tst_hidden_states = best_model(input_ids)[2][1][0, (test_i.size()[0] - 1), :].detach()  # <- here
            """,
        ),
        op=("dropout", "native_dropout", "bernoulli_"),
        says=("dropout",),
        fix=r"\.eval\(\)",
        fixed=(("input_ids = test_i[:, 0]\n", "best_model.eval()\ninput_ids = test_i[:, 0]\n"),),
        works="tst_hidden_states.shape == (64,)",
        needs="transformers",
    ),
    ReportCase(
        name="hidden state drawn in forward",
        source="https://github.com/schmidt-ju/crat-pred/issues/8",
        answer="forward draws the hidden and cell state with torch.randn, so that even in eval() each call differs: zeros.",
        magic="deterministic",
        cells=(
            """
            torch.manual_seed(0)

            class EncoderLstm(nn.Module):
                def __init__(self, input_size=3, hidden_size=128, num_layers=1):
                    super().__init__()
                    self.hidden_size = hidden_size
                    self.num_layers = num_layers
                    self.lstm = nn.LSTM(input_size, hidden_size, num_layers, batch_first=True)

                def forward(self, lstm_in, agents_per_sample):
                    lstm_hidden_state = torch.randn(  # <- here
                        self.num_layers, lstm_in.shape[0], self.hidden_size, device=lstm_in.device)  # <- here
                    lstm_cell_state = torch.randn(  # <- here
                        self.num_layers, lstm_in.shape[0], self.hidden_size, device=lstm_in.device)  # <- here
                    lstm_hidden = (lstm_hidden_state, lstm_cell_state)
                    lstm_out, lstm_hidden = self.lstm(lstm_in, lstm_hidden)
                    return lstm_out[:, -1, :]

            class CratPred(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.encoder_lstm = EncoderLstm()
                    self.decoder = nn.Linear(128, 30 * 2)

                def forward(self, batch):
                    agents_per_sample = [x.shape[0] for x in batch]
                    out = self.encoder_lstm(torch.cat(batch), agents_per_sample)
                    return self.decoder(out).view(-1, 30, 2)

            model = CratPred()
            model.eval()
            displ = [torch.rand(5, 19, 3), torch.rand(3, 19, 3)]
            """,
            """
            %%deterministic --verify -o r
            with torch.no_grad():
                output = model(displ)  # <- here
            """,
        ),
        op=("randn",),
        fix=r"zeros|manual_seed",
        fixed=(("torch.randn(", "torch.zeros("),),
        works="output.shape == (8, 30, 2)",
    ),
    ReportCase(
        name="torch is seeded and random is not",
        source="https://github.com/speechbrain/speechbrain/pull/135",
        answer="The ids are shuffled with random.shuffle, and only torch was seeded: seed random as well, or leave the shuffle out.",
        magic="deterministic",
        cells=(
            """
            data = {f"utt_{i:03d}": {"duration": 1.0 + (i * 37 % 50) / 10, "wav": np.sin(np.arange(160) * (i + 1) / 50)} for i in range(60)}

            class DatasetCreator:
                def __init__(self, data, sort):
                    self.data = data
                    self.sort = sort

                def sort_data(self):
                    sorted_ids = list(self.data.keys())
                    if self.sort == "ascending":
                        sorted_ids = sorted(sorted_ids, key=lambda k: self.data[k]["duration"])
                    if self.sort == "random":
                        random.shuffle(sorted_ids)  # <- here
                    return sorted_ids

                def batches(self, size):
                    ids = self.sort_data()  # <- here
                    for i in range(0, len(ids), size):
                        yield torch.stack([torch.from_numpy(self.data[k]["wav"]).float() for k in ids[i:i + size]])  # <- here
            """,
            """
            %%deterministic --verify -o r
            torch.manual_seed(1234)
            encoder = nn.Sequential(nn.Linear(160, 32), nn.ReLU(), nn.Linear(32, 160))
            optim = torch.optim.SGD(encoder.parameters(), lr=0.1)
            for epoch in range(2):
                for wavs in DatasetCreator(data, sort="random").batches(8):  # <- here
                    loss = F.mse_loss(encoder(wavs), wavs)
                    optim.zero_grad()
                    loss.backward()
                    optim.step()
            """,
        ),
        says=(r"random",),
        fix=r"random\.seed|random\.Random\(",
        fixed=(("torch.manual_seed(1234)\n", "torch.manual_seed(1234)\nrandom.seed(1234)\n"),),
        works="bool(torch.isfinite(loss))",
    ),
    ReportCase(
        name="the action space has a generator of its own",
        source="https://github.com/sfujim/TD3/issues/36",
        answer="action_space.sample() draws from the space's own generator, which no other seed reaches: env.action_space.seed(seed).",
        magic="deterministic",
        cells=(
            """
            class Box:
                def __init__(self, low, high, shape):
                    self.low, self.high, self.shape = low, high, shape
                    self.np_random = np.random.default_rng()  # <- here

                def seed(self, seed):
                    self.np_random = np.random.default_rng(seed)

                def sample(self):
                    return self.np_random.uniform(self.low, self.high, self.shape).astype(np.float32)  # <- here

            class Pendulum:
                def __init__(self):
                    self.action_space = Box(-2.0, 2.0, (1,))  # <- here

                def reset(self, seed):
                    self.np_random = np.random.default_rng(seed)
                    self.state = self.np_random.uniform(-1, 1, 2)
                    return self.state.astype(np.float32)

                def step(self, u):
                    th, thdot = self.state
                    thdot = thdot + (15 * np.sin(th) + 3 * float(u[0])) * 0.05
                    self.state = np.array([th + thdot * 0.05, thdot])
                    return self.state.astype(np.float32), -(th ** 2 + 0.1 * thdot ** 2), False

            class Critic(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.l1, self.l2 = nn.Linear(3, 64), nn.Linear(64, 1)

                def forward(self, state, action):
                    return self.l2(F.relu(self.l1(torch.cat([state, action], 1))))
            """,
            """
            %%deterministic --verify -o r
            seed, start_timesteps = 0, 60
            torch.manual_seed(seed)
            np.random.seed(seed)
            env = Pendulum()  # <- here
            state = env.reset(seed)
            critic = Critic()
            optimizer = torch.optim.Adam(critic.parameters(), lr=3e-4)
            replay = []
            for step in range(start_timesteps):
                action = env.action_space.sample()  # <- here
                next_state, reward, done = env.step(action)
                replay.append((state, action, next_state, reward))
                state = next_state
            for _ in range(10):
                batch = [replay[i] for i in np.random.randint(0, len(replay), 16)]
                s, a, n, r_ = (torch.as_tensor(np.array(part), dtype=torch.float32) for part in zip(*batch))
                loss = F.mse_loss(critic(s, a).squeeze(1), r_)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            """,
        ),
        says=(r"np_random|default_rng|action_space|NumPy",),
        fix=r"seed|default_rng\(\d",
        fixed=(("env = Pendulum()  # <- here\n", "env = Pendulum()\nenv.action_space.seed(seed)\n"),),
        works="bool(torch.isfinite(loss))",
    ),
    ReportCase(
        name="crops from default_rng in workers",
        source="https://github.com/SURF-ML/2D-VQ-AE-2/issues/12",
        answer="seed_everything seeds only the global np.random; a new np.random.default_rng() is not: draw the crops with torch.",
        magic="deterministic",
        cells=(
            """
            slides = np.linspace(0, 1, 8 * 64 * 64, dtype=np.float32).reshape(8, 64, 64)

            def seed_everything(seed):
                random.seed(seed)
                np.random.seed(seed)
                torch.manual_seed(seed)

            class WSIStackDataset(Dataset):
                def __init__(self, slides, crop=32):
                    self.slides, self.crop = slides, crop

                def __len__(self):
                    return len(self.slides)

                def __getitem__(self, i):
                    rng = np.random.default_rng()  # <- here
                    top, left = rng.integers(0, 64 - self.crop, size=2)  # <- here
                    return torch.from_numpy(self.slides[i, top:top + self.crop, left:left + self.crop]).unsqueeze(0)  # <- here

            class VQAE(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.encoder = nn.Conv2d(1, 4, 4, stride=4)
                    self.decoder = nn.ConvTranspose2d(4, 1, 4, stride=4)

                def forward(self, x):
                    return self.decoder(self.encoder(x))
            """,
            """
            %%deterministic --verify -o r
            seed_everything(5)
            model = VQAE()
            optim = torch.optim.Adam(model.parameters(), lr=1e-3)
            loader = DataLoader(WSIStackDataset(slides), batch_size=4, num_workers=2)  # <- here
            for epoch in range(2):
                for crop in loader:  # <- here
                    loss = F.mse_loss(model(crop), crop)
                    optim.zero_grad()
                    loss.backward()
                    optim.step()
            """,
        ),
        says=("default_rng",),
        never=(r"fix: .*worker_init_fn",),
        fix=r"torch\.rand|default_rng\(.+\)|\brng\b",
        fixed=(
            ("rng = np.random.default_rng()  # <- here\n", "crop_max = 64 - self.crop\n"),
            ("top, left = rng.integers(0, 64 - self.crop, size=2)", "top, left = torch.randint(0, crop_max, (2,)).tolist()"),
        ),
        works="bool(torch.isfinite(loss))",
    ),
    ReportCase(
        name="seed set after the model was made",
        source="https://github.com/SmartDataAnalytics/PyKEEN/issues/49",
        answer="The seed is set in the training function, after the model has drawn its weights: set it before the model is made.",
        magic="deterministic",
        cells=(
            """
            triples = np.array([[i % 14, i % 3, (i * 5 + 1) % 14] for i in range(80)])

            class TransE(nn.Module):
                def __init__(self, num_entities, num_relations, embedding_dim, margin_loss=1.0):
                    super().__init__()
                    self.margin_loss = margin_loss
                    self.entity_embeddings = nn.Embedding(num_entities, embedding_dim)  # <- here
                    self.relation_embeddings = nn.Embedding(num_relations, embedding_dim)  # <- here

                def score(self, t):
                    h, r, t = self.entity_embeddings(t[:, 0]), self.relation_embeddings(t[:, 1]), self.entity_embeddings(t[:, 2])
                    return (h + r - t).norm(dim=1)

                def forward(self, pos, neg):
                    return F.relu(self.margin_loss + self.score(pos) - self.score(neg)).mean()

            def train_kge_model(kge_model, learning_rate, num_epochs, batch_size, pos_triples, seed):
                np.random.seed(seed)
                torch.manual_seed(seed)
                optimizer = torch.optim.SGD(kge_model.parameters(), lr=learning_rate)
                losses = []
                for epoch in range(num_epochs):
                    np.random.shuffle(pos_triples)
                    for pos in np.array_split(pos_triples, len(pos_triples) // batch_size):
                        neg = pos.copy()
                        neg[:, 2] = np.random.randint(0, 14, len(neg))
                        optimizer.zero_grad()
                        loss = kge_model(torch.from_numpy(pos), torch.from_numpy(neg))
                        loss.backward()
                        optimizer.step()
                    losses.append(loss.item())
                return losses
            """,
            """
            %%deterministic --verify -o r
            config = {"random_seed": 2, "embedding_dim": 20, "learning_rate": 0.01, "num_epochs": 3, "batch_size": 20}
            kge_model = TransE(14, 3, config["embedding_dim"])  # <- here
            losses = train_kge_model(kge_model, config["learning_rate"], config["num_epochs"], config["batch_size"],
                                     triples.copy(), config["random_seed"])
            """,
        ),
        op=("normal_",),
        says=("seed",),
        fix=r"manual_seed",
        fixed=(("kge_model = TransE(", 'torch.manual_seed(config["random_seed"])\nkge_model = TransE('),),
        works="len(losses) == 3 and all(map(math.isfinite, losses))",
    ),
    ReportCase(
        name="another movie at each call",
        source="https://github.com/Lightning-AI/litgpt/issues/1757",
        answer="Tokens are sampled with torch's generator, which is not seeded: torch.manual_seed(0) before generate, or top_k=1.",
        magic="deterministic",
        cells=(
            """
            torch.manual_seed(100)

            class Block(nn.Module):
                def __init__(self, n_embd, n_head):
                    super().__init__()
                    self.norm_1, self.norm_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
                    self.attn = nn.MultiheadAttention(n_embd, n_head, batch_first=True)
                    self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

                def forward(self, x):
                    n = self.norm_1(x)
                    mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
                    x = x + self.attn(n, n, n, attn_mask=mask, need_weights=False)[0]
                    return x + self.mlp(self.norm_2(x))

            class LLM(nn.Module):
                def __init__(self, vocab=128, n_embd=32):
                    super().__init__()
                    self.wte, self.h = nn.Embedding(vocab, n_embd), nn.ModuleList([Block(n_embd, 2) for _ in range(2)])
                    self.lm_head = nn.Linear(n_embd, vocab, bias=False)

                def forward(self, idx):
                    x = self.wte(idx)
                    for block in self.h:
                        x = block(x)
                    return self.lm_head(x)

                @torch.inference_mode()
                def generate(self, prompt, max_new_tokens=10, temperature=1.0, top_k=None):
                    idx = torch.tensor([[ord(c) for c in prompt]])
                    for _ in range(max_new_tokens):
                        idx = torch.cat([idx, sample(self(idx), temperature, top_k)], dim=1)  # <- here
                    return "".join(map(chr, idx[0, len(prompt):].tolist()))

            def sample(logits, temperature=1.0, top_k=None):
                logits = logits[:, -1]
                if top_k is not None:
                    v, i = torch.topk(logits, top_k)
                    logits = torch.full_like(logits, float("-inf")).scatter_(-1, i, v)
                if temperature > 0.0:
                    probs = F.softmax(logits / temperature, dim=-1)
                    return torch.multinomial(probs, num_samples=1)  # <- here
                return logits.argmax(dim=-1, keepdim=True)

            llm = LLM().eval()
            """,
            """
            %%deterministic --verify -o r
            text = llm.generate("Recommend a movie", max_new_tokens=8, temperature=1)  # <- here
            print(text)
            """,
        ),
        op=("multinomial",),
        says=("seed",),
        fix=r"manual_seed|generator=",
        fixed=(("text = llm.generate(", "torch.manual_seed(0)\ntext = llm.generate("),),
        works="len(text) == 8",
    ),
    # --- what the second execution finds changed ----------------------------------------------------------------------------------
    ReportCase(
        name="only the training cell is run again",
        source="https://github.com/braindecode/braindecode/issues/128",
        answer="Only the training block was run again, so it went on from trained weights: make the model in the same block.",
        magic="deterministic",
        cells=(
            """
            seed = 20200220
            n_classes, n_chans, input_window_samples = 4, 22, 250

            class ShallowFBCSPNet(nn.Module):
                def __init__(self, in_chans, n_classes, n_filters=8):
                    super().__init__()
                    self.conv_time = nn.Conv2d(1, n_filters, (25, 1))
                    self.conv_spat = nn.Conv2d(n_filters, n_filters, (1, in_chans), bias=False)
                    self.bnorm = nn.BatchNorm2d(n_filters)
                    self.conv_classifier = nn.Conv2d(n_filters, n_classes, (11, 1))

                def forward(self, x):
                    x = self.bnorm(self.conv_spat(self.conv_time(x.transpose(1, 2).unsqueeze(1))))
                    x = F.avg_pool2d(x * x, (75, 1), (15, 1)).clamp(min=1e-6).log()
                    return F.log_softmax(self.conv_classifier(x), dim=1).flatten(1)

            torch.manual_seed(seed)
            trials = torch.randn(48, n_chans, input_window_samples)
            classes = torch.arange(48) % n_classes
            """,
            """
            torch.manual_seed(seed)
            model = ShallowFBCSPNet(n_chans, n_classes)
            """,
            """
            %%deterministic --verify -o r
            lr, weight_decay, n_epochs = 0.0625 * 0.01, 0, 2
            train_loader = DataLoader(TensorDataset(trials, classes), batch_size=16)
            optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
            history = []
            for epoch in range(n_epochs):
                for X, y in train_loader:
                    optimizer.zero_grad()
                    loss = F.nll_loss(model(X), y)  # <- here
                    loss.backward()
                    optimizer.step()  # <- here
                    history.append(loss.item())
            """,
        ),
        says=(r"\bmodel\b",),
        fix=r"\bmodel\b|ShallowFBCSPNet",
        fixed=(
            (
                "optimizer = torch.optim.AdamW(model",
                "torch.manual_seed(seed)\nmodel = ShallowFBCSPNet(n_chans, n_classes)\noptimizer = torch.optim.AdamW(model",
            ),
        ),
        works="len(history) == 6 and all(map(math.isfinite, history))",
    ),
    ReportCase(
        name="the dataset is normalized in place",
        source="https://github.com/facebookresearch/pycls/pull/21",
        answer="__getitem__ normalizes the loaded array in place, so that each look changes the dataset for good: copy the image.",
        magic="deterministic",
        cells=(
            """
            _MEAN, _SD = [125.3, 123.0, 113.9], [63.0, 62.1, 66.7]

            class Cifar10(Dataset):
                def __init__(self, n=64):
                    self._inputs = np.random.RandomState(0).randint(0, 255, (n, 3, 32, 32)).astype(np.float32)
                    self._labels = [i % 10 for i in range(n)]

                def __len__(self):
                    return self._inputs.shape[0]

                def _transform_image(self, image):
                    for i in range(3):
                        image[i] = image[i] - _MEAN[i]  # <- here
                        image[i] = image[i] / _SD[i]  # <- here
                    return image

                def __getitem__(self, index):
                    image, label = self._inputs[index, ...], self._labels[index]  # <- here
                    image = self._transform_image(image)  # <- here
                    return torch.from_numpy(image.copy()), label

            dataset = Cifar10()
            """,
            """
            %%deterministic --verify -o r
            torch.manual_seed(1)
            model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            loader = DataLoader(dataset, batch_size=16, shuffle=True, num_workers=0)
            for inputs, labels in loader:  # <- here
                loss = F.cross_entropy(model(inputs), labels)  # <- here
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            """,
        ),
        says=(r"dataset|_inputs",),
        fix=r"copy|clone",
        fixed=(("self._inputs[index, ...], self", "self._inputs[index, ...].copy(), self"),),
        works="bool(torch.isfinite(loss)) and float(dataset._inputs.max()) > 200",
    ),
    ReportCase(
        name="evaluation follows the running statistics",
        source="https://github.com/Project-MONAI/MONAI/issues/1728",
        answer="The forward in train mode updates BatchNorm's running statistics, which evaluation uses: eval() for that forward.",
        magic="deterministic",
        cells=(
            """
            from contextlib import contextmanager

            @contextmanager
            def eval_mode(*nets):
                training = [n for n in nets if n.training]
                try:
                    with torch.no_grad():
                        yield [n.eval() for n in nets]
                finally:
                    for n in training:
                        n.train()

            model = torch.nn.BatchNorm2d(1)
            im = torch.tensor([[[[0.3, 0.1], [-1.2, 0.9]]]])
            """,
            """
            %%deterministic --verify -o r
            for _ in range(5):
                res_train = model(im).flatten().detach()  # <- here
                with eval_mode(model):
                    res_eval = model(im).flatten()  # <- here
                print(res_train)
                print(res_eval)
            """,
        ),
        says=(r"model|running_mean",),
        fix=r"\.eval\(\)|model = |deepcopy|\bmodel\b",
        fixed=(("for _ in range(5):\n", "model.eval()\nfor _ in range(5):\n"),),
        works="torch.equal(res_train, res_eval)",
    ),
    ReportCase(
        name="the forecast is written into its initial condition",
        source="https://github.com/NVIDIA/earth2studio/issues/1133",
        answer="The model writes each step's result into the tensor that the caller passed: x = x.clone() first.",
        magic="deterministic",
        cells=(
            """
            torch.manual_seed(0)

            class StormCast(nn.Module):
                def __init__(self, variables=6):
                    super().__init__()
                    self.regression = nn.Conv2d(2 * variables, variables, 3, padding=1)
                    self.register_buffer("means", torch.full((1, variables, 1, 1), 0.5))
                    self.register_buffer("stds", torch.full((1, variables, 1, 1), 0.3))

                @torch.inference_mode()
                def _forward(self, x, conditioning):
                    x = (x - self.means) / self.stds
                    return self.regression(torch.cat([x, conditioning], dim=1)) * self.stds + self.means

                def call(self, x, conditioning):
                    for i in range(x.shape[0]):
                        for j in range(x.shape[1]):
                            for k in range(x.shape[2]):
                                x[i, j, k:k + 1] = self._forward(x[i, j, k:k + 1], conditioning[i, j, k:k + 1])  # <- here
                    return x

            stormcast = StormCast().eval()
            x0 = torch.rand(1, 1, 1, 6, 32, 32)
            conditioning = torch.rand(1, 1, 1, 6, 32, 32)
            """,
            """
            %%deterministic --verify -o r
            forecast = stormcast.call(x0, conditioning)  # <- here
            print(forecast.mean())
            """,
        ),
        says=(r"\bx0?\b",),
        fix=r"clone|copy",
        fixed=(("def call(self, x, conditioning):\n", "def call(self, x, conditioning):\n        x = x.clone()\n"),),
        works="forecast.data_ptr() != x0.data_ptr()",
    ),
    ReportCase(
        name="the class weights are popped from the caller's dict",
        source="https://github.com/KatherLab/MediSwarm/issues/430",
        answer="__init__ pops 'weight' out of the caller's dict, so that the second model is unweighted: copy the dict first.",
        magic="deterministic",
        cells=(
            """
            class BasicClassifier(nn.Module):
                def __init__(self, in_ch, out_ch, spatial_dims, loss_kwargs={}):
                    super().__init__()
                    class_weight = loss_kwargs.pop("weight", None)  # <- here
                    self.register_buffer("_class_weight", class_weight)
                    self.loss_kwargs = loss_kwargs
                    self.model = nn.Sequential(
                        nn.Conv3d(in_ch, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, out_ch))

                def training_step(self, volume, target):
                    return F.cross_entropy(self.model(volume), target, weight=self._class_weight, **self.loss_kwargs)  # <- here

            cfg = {"weight": torch.tensor([1.0, 2.0, 3.0]), "label_smoothing": 0.1}
            volumes = torch.linspace(0, 1, 12 * 8 ** 3).reshape(12, 1, 8, 8, 8)
            targets = torch.arange(12) % 3
            """,
            """
            %%deterministic --verify -o r
            torch.manual_seed(0)
            classifier = BasicClassifier(in_ch=1, out_ch=3, spatial_dims=3, loss_kwargs=cfg)  # <- here
            opt = torch.optim.Adam(classifier.parameters(), lr=1e-2)
            for _ in range(3):
                loss = classifier.training_step(volumes, targets)  # <- here
                opt.zero_grad()
                loss.backward()
                opt.step()
            """,
        ),
        says=(r"cfg|loss_kwargs",),
        fix=r"copy|dict\(|\{\*\*|\.get\(|cfg",
        fixed=(("class_weight = loss_kwargs.pop(", "loss_kwargs = dict(loss_kwargs)\n        class_weight = loss_kwargs.pop("),),
        works="'weight' in cfg and classifier._class_weight is not None",
    ),
    ReportCase(
        name="fit goes on from the checkpoint of the last run",
        source="https://github.com/PriorLabs/TabPFN/issues/814",
        answer="fit() resumes from a checkpoint that it finds in output_dir, so that the same script run again differs: start anew.",
        magic="deterministic",
        cells=(
            """
            from pathlib import Path
            X = torch.linspace(-1, 1, 96).reshape(24, 4)
            y = (X.sum(1) > 0).long()

            class FinetunedTabPFNClassifier:
                def __init__(self, epochs=2, learning_rate=1e-2):
                    self.epochs, self.learning_rate = epochs, learning_rate

                def fit(self, X, y, output_dir):
                    torch.manual_seed(0)
                    self.model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 2))
                    optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.learning_rate)
                    checkpoint = Path(output_dir) / "checkpoint.pth"
                    if checkpoint.exists():  # <- here
                        state = torch.load(checkpoint)  # <- here
                        self.model.load_state_dict(state["model"])  # <- here
                        optimizer.load_state_dict(state["optimizer"])  # <- here
                    for epoch in range(self.epochs):
                        self.loss = F.cross_entropy(self.model(X), y)  # <- here
                        optimizer.zero_grad()
                        self.loss.backward()
                        optimizer.step()
                    checkpoint.parent.mkdir(exist_ok=True)
                    torch.save({"model": self.model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)  # <- here
                    return self
            """,
            """
            %%deterministic --verify -o r
            clf = FinetunedTabPFNClassifier().fit(X, y, output_dir="finetuned")  # <- here
            print(clf.loss.item())
            """,
        ),
        says=(r"checkpoint|finetuned",),
        fix=r"checkpoint|output_dir|finetuned|delete|remove|unlink",
        fixed=(
            (
                "checkpoint = Path(output_dir)",
                'Path(output_dir, "checkpoint.pth").unlink(missing_ok=True)\n        checkpoint = Path(output_dir)',
            ),
        ),
        works="math.isfinite(clf.loss.item())",
    ),
    # --- order --------------------------------------------------------------------------------------------------------------------
    ReportCase(
        name="classes come out of a set",
        source="https://github.com/tkipf/pygcn/issues/41",
        answer="encode_onehot numbers the classes in the order of set(labels), another one in each process: sorted(set(labels)).",
        magic="deterministic",
        cells=(
            """
            n = 120
            subjects = ["Neural_Networks", "Theory", "Case_Based", "Genetic_Algorithms", "Rule_Learning", "Reinforcement_Learning"]
            idx_features_labels = np.array([[str(i)] + [str((i * k) % 7 % 2) for k in range(1, 33)] + [subjects[i % 6]] for i in range(n)])
            edges = np.array([[i, (i * 7 + 3) % n] for i in range(n)])

            def encode_onehot(labels):
                classes = set(labels)  # <- here
                classes_dict = {c: np.identity(len(classes))[i, :] for i, c in  # <- here
                                enumerate(classes)}  # <- here
                return np.array(list(map(classes_dict.get, labels)), dtype=np.int32)  # <- here

            class GraphConvolution(nn.Module):
                def __init__(self, in_features, out_features):
                    super().__init__()
                    self.weight = nn.Parameter(torch.FloatTensor(in_features, out_features))
                    self.bias = nn.Parameter(torch.FloatTensor(out_features))
                    stdv = 1.0 / math.sqrt(out_features)
                    self.weight.data.uniform_(-stdv, stdv)
                    self.bias.data.uniform_(-stdv, stdv)

                def forward(self, input, adj):
                    return torch.spmm(adj, torch.mm(input, self.weight)) + self.bias

            class GCN(nn.Module):
                def __init__(self, nfeat, nhid, nclass):
                    super().__init__()
                    self.gc1, self.gc2 = GraphConvolution(nfeat, nhid), GraphConvolution(nhid, nclass)

                def forward(self, x, adj):
                    return F.log_softmax(self.gc2(F.relu(self.gc1(x, adj)), adj), dim=1)
            """,
            """
            %%deterministic --verify -o r
            np.random.seed(42)
            torch.manual_seed(42)
            features = torch.FloatTensor(idx_features_labels[:, 1:-1].astype(np.float32))
            labels = torch.LongTensor(np.where(encode_onehot(idx_features_labels[:, -1]))[1])  # <- here
            i = torch.LongTensor(np.vstack([np.hstack([edges.T, edges[:, ::-1].T]), ]))
            adj = torch.sparse_coo_tensor(i, torch.full((i.shape[1],), 0.5), (n, n))
            model = GCN(nfeat=features.shape[1], nhid=16, nclass=labels.max().item() + 1)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
            for epoch in range(4):
                optimizer.zero_grad()
                output = model(features, adj)
                loss_train = F.nll_loss(output[:40], labels[:40])
                loss_train.backward()
                optimizer.step()
            """,
        ),
        says=(r"\bset\b", r"order|PYTHONHASHSEED|hash"),
        fix=r"sorted",
        fixed=(("classes = set(labels)", "classes = sorted(set(labels))"),),
        works="bool(torch.isfinite(loss_train))",
    ),
    ReportCase(
        name="files from listdir and an intersection",
        source="https://github.com/Lightning-Universe/lightning-flash/issues/1060",
        answer="load_data lists the files in arbitrary order, and the intersection of the two sets scrambles it again: sort both lists.",
        magic="deterministic",
        cells=(
            """
            for folder in ("images", "masks"):
                os.mkdir(folder)
                for k in range(20):
                    np.save(f"{folder}/scene_{k:02d}.npy", np.full((1, 16, 16), k * 0.05 if folder == "images" else k % 2, np.float32))

            class SemanticSegmentationFolderInput:
                def load_data(self, folder, mask_folder):
                    files = os.listdir(folder)  # <- here
                    mask_files = os.listdir(mask_folder)  # <- here
                    all_files = set(files).intersection(set(mask_files))  # <- here
                    files = [os.path.join(folder, file) for file in all_files]  # <- here
                    mask_files = [os.path.join(mask_folder, file) for file in all_files]  # <- here
                    return list(zip(files, mask_files))
            """,
            """
            %%deterministic --verify -o r
            random.seed(1)
            np.random.seed(1)
            torch.manual_seed(1)
            pairs = SemanticSegmentationFolderInput().load_data("images", "masks")  # <- here
            data = TensorDataset(*(torch.from_numpy(np.stack([np.load(pair[k]) for pair in pairs])) for k in range(2)))
            head = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1))
            optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
            for image, mask in DataLoader(data, batch_size=4, shuffle=True):
                loss = F.binary_cross_entropy_with_logits(head(image), mask)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            """,
        ),
        says=(r"order|set\b|listdir",),
        fix=r"sort",
        fixed=(("all_files = set(files).intersection(set(mask_files))", "all_files = sorted(set(files).intersection(set(mask_files)))"),),
        works="bool(torch.isfinite(loss))",
    ),
    ReportCase(
        name="parameter groups by the difference of sets",
        source="https://github.com/lucidrains/DALLE2-pytorch/pull/130",
        answer="The optimizer takes its parameters from sets, in another order each time, so a state goes to other parameters: lists.",
        magic="deterministic",
        cells=(
            """
            class Prior(nn.Module):
                def __init__(self, dim=24, depth=6):
                    super().__init__()
                    self.layers = nn.ModuleList([nn.Linear(dim, dim) for _ in range(depth)])
                    self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(depth)])

                def forward(self, x):
                    for layer, norm in zip(self.layers, self.norms):
                        x = x + F.gelu(layer(norm(x)))
                    return x

            def separate_weight_decayable_params(params):
                no_wd_params = set([param for param in params if param.ndim < 2])  # <- here
                wd_params = set(params) - no_wd_params  # <- here
                return wd_params, no_wd_params

            def get_optimizer(params, lr=1e-2, wd=1e-2):
                wd_params, no_wd_params = separate_weight_decayable_params(params)  # <- here
                param_groups = [{"params": list(wd_params)}, {"params": list(no_wd_params), "weight_decay": 0}]  # <- here
                return torch.optim.AdamW(param_groups, lr=lr, weight_decay=wd)  # <- here

            embeds = torch.linspace(-1, 1, 16 * 24).reshape(16, 24)
            torch.manual_seed(0)
            prior = Prior()
            optim = get_optimizer(list(prior.parameters()))
            F.mse_loss(prior(embeds), embeds.flip(1)).backward()
            optim.step()
            torch.save({"model": prior.state_dict(), "optimizer": optim.state_dict()}, "prior.pth")
            """,
            """
            %%deterministic --verify -o r
            saved = torch.load("prior.pth")
            prior = Prior()
            prior.load_state_dict(saved["model"])
            optim = get_optimizer(list(prior.parameters()))  # <- here
            optim.load_state_dict(saved["optimizer"])
            for _ in range(3):
                loss = F.mse_loss(prior(embeds), embeds.flip(1))
                optim.zero_grad()
                loss.backward()
                optim.step()
            """,
        ),
        says=(r"\bset\b|order",),
        fix=r"list|sorted|dict\.fromkeys|order",
        fixed=(
            (
                "no_wd_params = set([param for param in params if param.ndim < 2])",
                "no_wd_params = [param for param in params if param.ndim < 2]",
            ),
            ("wd_params = set(params) - no_wd_params", "wd_params = [param for param in params if param.ndim >= 2]"),
        ),
        works="bool(torch.isfinite(loss))",
    ),
    ReportCase(
        name="seeds from the hash of a string",
        source="https://github.com/wandb/docs/pull/3072",
        answer="hash() of a string is salted anew in each process, so that the seeds made from it differ: one named integer.",
        magic="deterministic",
        cells=(
            """
            images = torch.linspace(0, 1, 64 * 28 * 28).reshape(64, 1, 28, 28)
            digits = torch.arange(64) % 10

            class ConvNet(nn.Module):
                def __init__(self, kernels, classes=10):
                    super().__init__()
                    self.layer1 = nn.Sequential(nn.Conv2d(1, kernels[0], 5, padding=2), nn.ReLU(), nn.MaxPool2d(2))
                    self.layer2 = nn.Sequential(nn.Conv2d(kernels[0], kernels[1], 5, padding=2), nn.ReLU(), nn.MaxPool2d(2))
                    self.fc = nn.Linear(7 * 7 * kernels[-1], classes)

                def forward(self, x):
                    return self.fc(self.layer2(self.layer1(x)).flatten(1))
            """,
            """
            %%deterministic --verify -o r
            random.seed(hash("setting random seeds") % 2**32 - 1)  # <- here
            np.random.seed(hash("improves reproducibility") % 2**32 - 1)  # <- here
            torch.manual_seed(hash("by removing stochasticity") % 2**32 - 1)  # <- here
            model = ConvNet([8, 16])
            optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
            for x, labels in DataLoader(TensorDataset(images, digits), batch_size=32, shuffle=True):
                loss = F.cross_entropy(model(x), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            """,
        ),
        says=(r"hash",),
        fix=r"integer|number|constant|hashlib|zlib|crc32|PYTHONHASHSEED|seed\(\d|= \d",
        fixed=(
            ('random.seed(hash("setting random seeds") % 2**32 - 1)', "random.seed(42)"),
            ('np.random.seed(hash("improves reproducibility") % 2**32 - 1)', "np.random.seed(42)"),
            ('torch.manual_seed(hash("by removing stochasticity") % 2**32 - 1)', "torch.manual_seed(42)"),
        ),
        works="bool(torch.isfinite(loss))",
    ),
    # --- clock, races, memory -----------------------------------------------------------------------------------------------------
    ReportCase(
        name="workers seeded by the clock",
        source="https://github.com/isl-org/Open3D-ML/pull/254",
        answer="worker_init_fn seeds NumPy with int(time.time()), which no run repeats: take the worker's seed from torch.",
        magic="deterministic",
        cells=(
            """
            class PointCloud(Dataset):
                def __init__(self, n=8):
                    self.points = np.linspace(-1, 1, n * 256 * 3, dtype=np.float32).reshape(n, 256, 3)

                def __len__(self):
                    return len(self.points)

                def __getitem__(self, i):
                    choice = np.random.choice(256, 64)
                    jitter = np.random.normal(0, 0.02, (64, 3)).astype(np.float32)
                    return self.points[i][choice] + jitter

            class PointNet(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.mlp, self.head = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 64)), nn.Linear(64, 4)

                def forward(self, x):
                    return self.head(self.mlp(x).max(dim=1).values)
            """,
            """
            %%deterministic --verify -o r
            torch.manual_seed(0)
            np.random.seed(0)
            model = PointNet()
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            train_loader = DataLoader(PointCloud(), batch_size=4, shuffle=True, num_workers=2,  # <- here
                                      worker_init_fn=lambda x: np.random.seed(x + int(time.time())))  # <- here
            for epoch in range(2):
                for points in train_loader:  # <- here
                    loss = model(points).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            """,
        ),
        says=(r"time\.time|clock",),
        fix=r"initial_seed|get_worker_info|torch\.|worker_init_fn|leave .* out|remove",
        fixed=(("np.random.seed(x + int(time.time()))", "np.random.seed(torch.initial_seed() % 2**32)"),),
        works="bool(torch.isfinite(loss))",
    ),
    ReportCase(
        name="lines are parsed in parallel",
        source="https://github.com/mittagessen/kraken/issues/302",
        answer="Parallel parsing of the training files adds lines in the order in which they get done, whatever the seed: keep the order.",
        magic="deterministic",
        cells=(
            """
            from multiprocessing.pool import ThreadPool

            def parse(path):
                page = int(path[5:-4])
                time.sleep(0.003)  # the disk
                line = np.sin(np.arange(48 * 32) * (page + 1) / 90).reshape(48, 32).astype(np.float32)
                return {"image": line, "label": page % 5}

            class GroundTruthDataset(Dataset):
                def __init__(self):
                    self._images, self._gt = [], []

                def add(self, image, label):
                    self._images.append(torch.from_numpy(image))
                    self._gt.append(label)

                def __getitem__(self, i):
                    return self._images[i], self._gt[i]

                def __len__(self):
                    return len(self._images)
            """,
            """
            %%deterministic --verify -o r
            torch.manual_seed(1234)
            np.random.seed(1234)
            gt_set = GroundTruthDataset()
            with ThreadPool(4) as pool:
                for line in pool.imap_unordered(parse, [f"page_{i:02d}.xml" for i in range(24)]):  # <- here
                    gt_set.add(**line)  # <- here
            nn_ = nn.Sequential(nn.Flatten(), nn.Linear(48 * 32, 5))
            optim = torch.optim.Adam(nn_.parameters(), lr=1e-3)
            for image, target in DataLoader(gt_set, batch_size=6, shuffle=True):
                loss = F.cross_entropy(nn_(image), target)
                optim.zero_grad()
                loss.backward()
                optim.step()
            """,
        ),
        says=(r"imap_unordered|order",),
        fix=r"\bi?map\b|sort",
        fixed=(("pool.imap_unordered(", "pool.imap("),),
        works="len(gt_set) == 24 and bool(torch.isfinite(loss))",
    ),
    ReportCase(
        name="a key-value cache that nobody wrote",
        source="https://github.com/vllm-project/vllm/issues/940",
        answer="The cache is allocated with torch.empty, and blocks that were never written are read: torch.zeros.",
        magic="deterministic",
        cells=(
            """
            torch.manual_seed(0)

            class CacheEngine:
                def __init__(self, num_layers=2, num_gpu_blocks=8, block_size=16, num_heads=4, head_size=16):
                    self.shape, self.num_layers = (num_gpu_blocks, block_size, num_heads, head_size), num_layers

                def allocate_gpu_cache(self):
                    gpu_cache = []
                    for _ in range(self.num_layers):
                        key_blocks = torch.empty(size=self.shape)  # <- here
                        value_blocks = torch.empty(size=self.shape)  # <- here
                        gpu_cache.append((key_blocks, value_blocks))
                    return gpu_cache

            class Attention(nn.Module):
                def __init__(self, dim=64, heads=4):
                    super().__init__()
                    self.heads, self.qkv = heads, nn.Linear(dim, 3 * dim)

                def forward(self, x, cache, blocks):
                    q, k, v = self.qkv(x).view(x.shape[0], 3, self.heads, -1).unbind(1)
                    keys, values = (part[blocks].flatten(0, 1) for part in cache)
                    keys[: len(x)], values[: len(x)] = k, v
                    cache[0][blocks], cache[1][blocks] = keys.view(-1, 16, 4, 16), values.view(-1, 16, 4, 16)
                    mask = torch.arange(len(keys)) < len(x)
                    weights = torch.softmax(torch.einsum("qhd,khd->hqk", q, keys) / 4, dim=-1) * mask
                    return x + torch.einsum("hqk,khd->qhd", weights, values).flatten(1)

            layers = nn.ModuleList([Attention(), Attention()]).eval()
            prompt = torch.rand(10, 64)
            """,
            """
            %%deterministic --verify -o r
            cache = CacheEngine().allocate_gpu_cache()  # <- here
            hidden = prompt
            with torch.no_grad():
                for layer, layer_cache in zip(layers, cache):
                    hidden = layer(hidden, layer_cache, torch.tensor([2, 5]))
            """,
        ),
        op=("empty",),
        says=(r"uninitiali[sz]ed|never written|nobody|not written|empty",),
        fix=r"torch\.zeros|zeros",
        fixed=(("torch.empty(size=self.shape)", "torch.zeros(size=self.shape)"),),
        works="bool(torch.isfinite(hidden).all())",
    ),
    # --- since the cell was edited, or on resuming --------------------------------------------------------------------------------
    ReportCase(
        name="a validation loop changes training",
        source="https://github.com/pytorch/pytorch/issues/80119",
        answer="Each iterator of a DataLoader draws a seed from torch's generator, shuffled or not: give the training loader a generator.",
        magic="deterministic",
        cells=(
            """
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.fc = nn.Linear(1, 1)

                def forward(self, x):
                    return self.fc(x)
            """,
            """
            %%deterministic -o without_validation
            torch.manual_seed(2022)
            train_dataset = TensorDataset(torch.randn(5, 1))
            val_dataset = TensorDataset(torch.randn(2, 1))
            train_loader = DataLoader(dataset=train_dataset, shuffle=True, batch_size=1)
            val_loader = DataLoader(dataset=val_dataset, shuffle=False, batch_size=1)
            net = Net()
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            for epoch in range(3):
                # train
                for _, x in enumerate(train_loader):
                    loss = (net(x[0]) - 2 * x[0]).square().mean()
                    opt.zero_grad()
                    loss.backward()
                    opt.step()
            """,
            """
            %%deterministic --against without_validation -o r
            torch.manual_seed(2022)
            train_dataset = TensorDataset(torch.randn(5, 1))
            val_dataset = TensorDataset(torch.randn(2, 1))
            train_loader = DataLoader(dataset=train_dataset, shuffle=True, batch_size=1)
            val_loader = DataLoader(dataset=val_dataset, shuffle=False, batch_size=1)
            net = Net()
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            for epoch in range(3):
                # train
                for _, x in enumerate(train_loader):
                    loss = (net(x[0]) - 2 * x[0]).square().mean()
                    opt.zero_grad()
                    loss.backward()
                    opt.step()
                # val
                for _, x in enumerate(val_loader):  # <- here
                    pass
            """,
        ),
        says=(r"val_loader", r"seed|draw"),
        fix=r"generator=",
        fixed=(
            (
                "shuffle=True, batch_size=1)",
                "shuffle=True, batch_size=1, generator=torch.Generator().manual_seed(2022))",
            ),
        ),
        works="bool(torch.isfinite(loss))",
    ),
    ReportCase(
        name="a layer that is not used changes the result",
        source="https://github.com/pytorch/pytorch/issues/46149",
        answer="nn.Linear draws its weights when it is made, used or not, so that all that is drawn after it is other numbers.",
        magic="deterministic",
        cells=(
            """
            seed = 16

            class WideResNetFeatures(nn.Module):
                def __init__(self, width=32):
                    super().__init__()
                    self.conv1 = nn.Conv2d(3, width, 3, stride=2, padding=1)
                    self.bn1 = nn.BatchNorm2d(width)
                    self.conv2 = nn.Conv2d(width, 640, 3, stride=2, padding=1)

                def forward(self, x):
                    return self.conv2(F.relu(self.bn1(self.conv1(x)))).mean((2, 3))

            support = torch.linspace(-1, 1, 5 * 3 * 16 * 16).reshape(5, 3, 16, 16)
            query = support.flip(3) * 0.9
            """,
            """
            %%deterministic -o plain
            np.random.seed(seed)
            torch.manual_seed(seed)
            model = WideResNetFeatures()
            prototypes = model(support)
            acc = (torch.cdist(model(query), prototypes).argmin(1) == torch.arange(5)).float().mean()
            """,
            """
            %%deterministic --against plain -o r
            np.random.seed(seed)
            torch.manual_seed(seed)
            classifier = nn.Linear(640, 5)  # <- here
            model = WideResNetFeatures()
            prototypes = model(support)
            acc = (torch.cdist(model(query), prototypes).argmin(1) == torch.arange(5)).float().mean()
            """,
        ),
        says=(r"classifier", r"random|draw|seed"),
        fix=r"manual_seed|fork_rng|after|generator",
        fixed=(("classifier = nn.Linear(640, 5)", "classifier = nn.Linear(640, 5)\ntorch.manual_seed(seed)"),),
        works="0 <= acc.item() <= 1",
    ),
    ReportCase(
        name="resumed without the optimizer's state",
        source="https://github.com/Lightning-AI/pytorch-lightning/issues/2613",
        answer="The optimizer's state is not loaded from the checkpoint, so that Adam begins anew: optimizer.load_state_dict.",
        magic="deterministic",
        cells=(
            """
            images = torch.linspace(0, 1, 64 * 28 * 28).reshape(64, 1, 28, 28)
            digits = torch.arange(64) % 10

            class LitModel(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.l1 = torch.nn.Linear(28 * 28, 10)

                def forward(self, x):
                    return torch.relu(self.l1(x.view(x.size(0), -1)))

                def training_step(self, batch):
                    x, y = batch
                    return F.cross_entropy(self(x), y)
            """,
            """
            %%deterministic -o straight
            torch.manual_seed(0)
            model = LitModel()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
            for epoch in range(4):
                shuffled = torch.Generator().manual_seed(epoch)
                for batch in DataLoader(TensorDataset(images, digits), batch_size=16, shuffle=True, generator=shuffled):
                    loss = model.training_step(batch)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                if epoch == 1:
                    torch.save({"epoch": epoch, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.ckpt")
            """,
            """
            %%deterministic --against straight -o r
            checkpoint = torch.load("last.ckpt")
            model = LitModel()
            model.load_state_dict(checkpoint["state_dict"])
            optimizer = torch.optim.Adam(model.parameters(), lr=0.001)  # <- here
            for epoch in range(checkpoint["epoch"] + 1, 4):
                shuffled = torch.Generator().manual_seed(epoch)
                for batch in DataLoader(TensorDataset(images, digits), batch_size=16, shuffle=True, generator=shuffled):
                    loss = model.training_step(batch)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()  # <- here
            """,
        ),
        says=(r"optimizer", r"exp_avg|state"),
        fix=r"optimizer\.load_state_dict|load_state_dict|state_dict",
        fixed=(("for epoch in range(checkpoint", 'optimizer.load_state_dict(checkpoint["optimizer"])\nfor epoch in range(checkpoint'),),
        works="bool(torch.isfinite(loss)) and optimizer.state[model.l1.weight]['step'] == 16",
    ),
    ReportCase(
        name="resumed without the schedule",
        source="https://github.com/PolymathicAI/the_well/pull/63",
        answer="The schedule is not in the checkpoint, so that warmup and decay begin anew: save and load lr_scheduler.state_dict().",
        magic="deterministic",
        cells=(
            """
            fields = torch.linspace(-1, 1, 16 * 2 * 16 * 16).reshape(16, 2, 16, 16)

            class FNOBlock(nn.Module):
                def __init__(self, channels=2, hidden=8):
                    super().__init__()
                    self.lift, self.project = nn.Conv2d(channels, hidden, 1), nn.Conv2d(hidden, channels, 1)

                def forward(self, x):
                    return self.project(F.gelu(self.lift(x)))

            class Trainer:
                def __init__(self, model, max_epoch=6):
                    self.model, self.max_epoch, self.starting_epoch = model, max_epoch, 0
                    self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
                    warmup = torch.optim.lr_scheduler.LinearLR(self.optimizer, start_factor=0.1, total_iters=2)
                    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=4)
                    self.lr_scheduler = torch.optim.lr_scheduler.SequentialLR(self.optimizer, [warmup, cosine], [2])  # <- here

                def save_model(self, epoch, path):
                    torch.save({"epoch": epoch, "model": self.model.state_dict(), "optim": self.optimizer.state_dict()}, path)

                def load_checkpoint(self, path):
                    checkpoint = torch.load(path)
                    self.model.load_state_dict(checkpoint["model"])
                    self.optimizer.load_state_dict(checkpoint["optim"])
                    self.starting_epoch = checkpoint["epoch"] + 1  # <- here

                def train(self):
                    for epoch in range(self.starting_epoch, self.max_epoch):
                        self.loss = F.mse_loss(self.model(fields), fields.roll(1, 0))
                        self.optimizer.zero_grad()
                        self.loss.backward()
                        self.optimizer.step()  # <- here
                        self.lr_scheduler.step()  # <- here
                        if epoch == 2:
                            self.save_model(epoch, "recent.pt")
            """,
            """
            %%deterministic -o uninterrupted
            torch.manual_seed(0)
            trainer = Trainer(FNOBlock())
            trainer.train()
            """,
            """
            %%deterministic --against uninterrupted -o r
            torch.manual_seed(0)
            trainer = Trainer(FNOBlock())
            trainer.load_checkpoint("recent.pt")  # <- here
            trainer.train()  # <- here
            """,
        ),
        says=(r"\blr\b|learning rate|lr_scheduler",),
        fix=r"scheduler|load_state_dict|state_dict",
        fixed=(
            (
                '"optim": self.optimizer.state_dict()}',
                '"optim": self.optimizer.state_dict(),\n                    "sched": self.lr_scheduler.state_dict()}',
            ),
            (
                'self.optimizer.load_state_dict(checkpoint["optim"])',
                'self.optimizer.load_state_dict(checkpoint["optim"])\n        self.lr_scheduler.load_state_dict(checkpoint["sched"])',
            ),
        ),
        works="trainer.loss.isfinite().item() and trainer.lr_scheduler.last_epoch == 6",
    ),
    # --- nothing is wrong ---------------------------------------------------------------------------------------------------------
    ReportCase(
        name="three draws after one seed",
        source="https://github.com/pytorch/pytorch/issues/18119",
        answer="A seed fixes the sequence; it does not make each draw the same.",
        magic="deterministic",
        cells=(
            """
            %%deterministic --verify -o r
            # Set random seed for reproducibility
            manualSeed = 9999
            print("Random Seed: ", manualSeed)
            np.random.seed(manualSeed)
            random.seed(manualSeed)
            torch.manual_seed(manualSeed)
            torch_seed = torch.initial_seed()
            print("torch_seed: {}".format(torch_seed))
            print(torch.rand(5))
            print(torch.rand(5))
            print(torch.rand(5))
            """,
        ),
        healthy=True,
    ),
    ReportCase(
        name="four workers and one seed",
        source="https://github.com/pytorch/pytorch/issues/7209",
        answer="A seeded DataLoader with workers gives the same batches every time, also where the dataset draws from torch.",
        magic="deterministic",
        cells=(
            """
            %%deterministic --verify -o r
            x = np.arange(30)

            def transform(v):
                return v + torch.rand(1).item()

            class TestDataset(Dataset):
                def __len__(self):
                    return 30

                def __getitem__(self, index):
                    return transform(x[index]), x[index]

            dataset = TestDataset()
            torch.manual_seed(12345)
            loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=4, drop_last=True)

            for batch in loader:
                print(batch)
            """,
        ),
        healthy=True,
    ),
    ReportCase(
        name="a second loader that is only made",
        source="https://github.com/pytorch/pytorch/issues/36998",
        answer="Making a DataLoader does not advance the generator; only an iterator of it would.",
        magic="deterministic",
        cells=(
            """
            features = torch.linspace(-1, 1, 60).reshape(20, 3)
            targets = features.sum(1, keepdim=True)
            """,
            """
            %%deterministic -o loader_a_alone
            torch.manual_seed(0)
            loader_a = DataLoader(TensorDataset(features, targets), batch_size=5, shuffle=True)
            model = nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for epoch in range(2):
                for x, y in loader_a:
                    optimizer.zero_grad()
                    loss = F.mse_loss(model(x), y)
                    loss.backward()
                    optimizer.step()
                print(epoch, loss.item())
            """,
            """
            %%deterministic --against loader_a_alone -o r
            torch.manual_seed(0)
            loader_a = DataLoader(TensorDataset(features, targets), batch_size=5, shuffle=True)
            # a second one, which training does not use
            loader_b = DataLoader(TensorDataset(features, targets), batch_size=5, shuffle=True)
            model = nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for epoch in range(2):
                for x, y in loader_a:
                    optimizer.zero_grad()
                    loss = F.mse_loss(model(x), y)
                    loss.backward()
                    optimizer.step()
                print(epoch, loss.item())
            """,
        ),
        healthy=True,
    ),
)
