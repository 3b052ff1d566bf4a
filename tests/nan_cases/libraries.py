"""Bugs inside models and loops that other people wrote: transformers and lightning, from config, nothing downloaded."""

from tests.nan_cases import slugs
from tests.nan_cases.case import Case, Expect, Nothing

_GPT2 = """
    from transformers import GPT2Config, GPT2LMHeadModel
    config = GPT2Config(
        vocab_size=20, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, attn_implementation="eager"
    )
    model = GPT2LMHeadModel(config)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 20, (2, 6))
"""

_BERT = """
    from transformers import BertConfig, BertForSequenceClassification
    config = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, max_position_embeddings=8
    )
    model = BertForSequenceClassification(config)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    ids, mask, labels = torch.randint(1, 20, (3, 5)), torch.ones(3, 5, dtype=torch.long), torch.tensor([0, 1, 1])
"""

_LIGHTNING = """
    import logging, warnings
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader, TensorDataset
    features = torch.rand(12, 3) + 0.5
    def trainer(**more):
        return pl.Trainer(
            max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            accelerator="cpu", **more
        )
"""

CASES = (
    Case(
        name="hf_gpt2_causal_mask",
        needs="transformers",
        setup=_GPT2,
        cell="""
            for _ in range(2):
                loss = model(input_ids=ids, labels=ids).loss
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Nothing(steps=2),
    ),
    Case(
        name="hf_gpt2_left_padding_masks_whole_rows",
        needs="transformers",
        setup=_GPT2
        + """
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
""",
        cell="""
            for _ in range(2):
                loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Nothing(steps=2),
    ),
    Case(
        name="hf_gpt2_log_planted_in_an_mlp",
        needs="transformers",
        setup=_GPT2
        + """
    class LogAct(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0
        def forward(self, x):
            self.calls += 1
            if self.calls > 3:
                return torch.log(x)  # <- here
            return torch.relu(x)
    model.transformer.h[1].mlp.act = LogAct()
""",
        cell="""
            for _ in range(6):
                loss = model(input_ids=ids, labels=ids).loss
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="forward", op="log", module="transformer.h.1.mlp.act", step=3, rows=(0, 1)),
    ),
    Case(
        name="hf_gpt2_all_labels_ignored",
        needs="transformers",
        setup=_GPT2
        + """
    labels = [ids, torch.full_like(ids, -100)]
""",
        cell="""
            for target in labels:
                loss = model(input_ids=ids, labels=target).loss  # <- here
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="forward", op="nll_loss_forward", module="", step=1, rows=(), diagnosis=slugs.ALL_IGNORED),
    ),
    Case(
        name="hf_gpt2_layer_norm_without_eps",
        needs="transformers",
        setup="""
            from transformers import GPT2Config, GPT2LMHeadModel
            config = GPT2Config(
                vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
                layer_norm_epsilon=0.0, embd_pdrop=0.0, attn_implementation="eager",
            )
            model = GPT2LMHeadModel(config)
            with torch.no_grad():
                model.transformer.wte.weight[7] = 0.0
                model.transformer.wpe.weight.zero_()
            opt = torch.optim.SGD(model.parameters(), lr=0.0)
            batches = [torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6], [1, 7, 2]])]
        """,
        cell="""
            for ids in batches:
                loss = model(input_ids=ids, labels=ids).loss  # <- here
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(
            kind="nan", phase="forward", op="native_layer_norm", module="transformer.h.0.ln_1", step=1, rows=(1,), diagnosis=slugs.EPS_ZERO
        ),
    ),
    Case(
        name="hf_bert_bad_weight",
        needs="transformers",
        setup=_BERT
        + """
    with torch.no_grad():
        model.bert.encoder.layer[1].attention.self.query.weight[3] = float("nan")
""",
        cell="""
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="nan", phase="parameter", op=None, step=0, rows=(3,), tensor="bert.encoder.layer.1.attention.self.query.weight"),
    ),
    Case(
        name="hf_bert_fully_masked_row",
        needs="transformers",
        setup=_BERT
        + """
    mask[1] = 0
""",
        cell="""
            for _ in range(2):
                loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Nothing(steps=2),
    ),
    Case(
        name="hf_bert_own_pooling_divides_by_the_mask",
        needs="transformers",
        setup="""
            from transformers import BertConfig, BertModel
            config = BertConfig(
                vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, max_position_embeddings=8
            )
            class Encoder(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.bert = BertModel(config, add_pooling_layer=False)
                    self.head = nn.Linear(8, 2)
                def forward(self, ids, mask):
                    hidden = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
                    pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)  # <- here
                    return self.head(pooled)
            model = Encoder()
            opt = torch.optim.SGD(model.parameters(), lr=1e-3)
            ids, labels = torch.randint(1, 20, (3, 5)), torch.tensor([0, 1, 1])
            masks = [torch.ones(3, 5), torch.ones(3, 5)]
            masks[1][2] = 0
        """,
        cell="""
            for mask in masks:
                loss = F.cross_entropy(model(ids, mask), labels)
                opt.zero_grad()
                loss.backward()
                opt.step()
        """,
        truth=Expect(kind="nan", phase="forward", op="div", module="", step=1, rows=(2,), diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="lightning_log_in_the_training_step",
        needs="lightning",
        setup=_LIGHTNING
        + """
    features[9] = 0.0
    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(3, 1)
            torch.nn.init.ones_(self.net.weight); torch.nn.init.zeros_(self.net.bias)
        def training_step(self, batch, index):
            x, = batch
            score = self.net(x)
            target = torch.log(x.sum(1, keepdim=True))  # <- here
            return F.mse_loss(score, target)
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)
    model, loader = Net(), DataLoader(TensorDataset(features), batch_size=3)
""",
        cell="""
            trainer().fit(model, loader)
        """,
        # Row 9 is the first of the fourth batch. training_step is a method that nobody calls as a module.
        truth=Expect(kind="inf", phase="loss", op="log", module=None, step=3, rows=(0,), diagnosis=slugs.LOG_ZERO),
    ),
    Case(
        name="lightning_bad_layer",
        needs="lightning",
        setup=_LIGHTNING
        + """
    features[7] = 0.0
    class Share(nn.Module):
        def forward(self, x):
            return x / x.sum(1, keepdim=True)  # <- here
    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 3, bias=False), Share(), nn.Linear(3, 1))
        def forward(self, x):
            return self.net(x)
        def training_step(self, batch, index):
            return self(batch[0]).square().mean()
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-3)
    model, loader = Net(), DataLoader(TensorDataset(features), batch_size=4)
""",
        cell="""
            trainer().fit(model, loader)
        """,
        truth=Expect(kind="nan", phase="forward", op="div", module="net.1", step=1, rows=(3,), diagnosis=slugs.DIV_ZERO),
    ),
    Case(
        name="lightning_nothing_wrong",
        needs="lightning",
        setup=_LIGHTNING
        + """
    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.3), nn.Linear(3, 1))
        def training_step(self, batch, index):
            return self.net(batch[0]).square().mean()
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-3)
    model, loader = Net(), DataLoader(TensorDataset(features), batch_size=4)
""",
        cell="""
            trainer(gradient_clip_val=1.0).fit(model, loader)
        """,
        truth=Nothing(steps=3, backwards=3),
    ),
    Case(
        name="lightning_manual_optimization",
        needs="lightning",
        setup=_LIGHTNING
        + """
    features[4] = 0.0
    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.net = nn.Linear(3, 3, bias=False)
        def training_step(self, batch, index):
            opt = self.optimizers()
            length = self.net(batch[0]).square().sum(1).sqrt()  # <- here
            loss = length.mean()
            opt.zero_grad()
            self.manual_backward(loss)
            opt.step()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)
    model, loader = Net(), DataLoader(TensorDataset(features), batch_size=4)
""",
        cell="""
            trainer().fit(model, loader)
        """,
        truth=Expect(kind="inf", phase="backward", op="sqrt", module=None, step=1, rows=(0,), diagnosis=slugs.SQRT_ZERO),
    ),
    Case(
        name="hf_trainer_style_loop",
        needs="transformers",
        setup=_GPT2
        + """
    class LogAct(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0
        def forward(self, x):
            self.calls += 1
            return torch.log(x) if self.calls == 3 else torch.relu(x)  # <- here
    model.transformer.h[0].mlp.act = LogAct()
    class Trainer:
        def __init__(self, model, batches):
            self.model, self.batches, self.total, self.logs = model, batches, torch.tensor(0.0), []
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        def compute_loss(self, model, inputs, return_outputs=False):
            outputs = model(**inputs)
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
            return (loss, outputs) if return_outputs else loss
        def training_step(self, model, inputs):
            model.train()
            loss = self.compute_loss(model, inputs)
            loss.backward()
            return loss.detach()
        def train(self):
            for step, inputs in enumerate(self.batches):
                loss = self.training_step(self.model, inputs)
                if torch.isnan(loss) or torch.isinf(loss):
                    self.total += self.total / (1 + step)  # the log hides it
                else:
                    self.total += loss
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.model.zero_grad()
                self.logs.append(self.total.item() / (step + 1))
""",
        cell="""
            Trainer(model, [{"input_ids": ids, "labels": ids} for _ in range(5)]).train()
        """,
        truth=Expect(kind="nan", phase="forward", op="log", module="transformer.h.0.mlp.act", step=2, rows=(0, 1)),
    ),
)
