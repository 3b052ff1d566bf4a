"""Bugs inside models and loops that other people wrote: transformers and lightning, from config, nothing downloaded."""

from tests.nan_cases.case import Case, Nothing

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
)
