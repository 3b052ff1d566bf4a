"""Values: decoys that were healed, odd dtypes, odd ops, and where a bad tensor was kept."""

from tests.nan_cases.case import ANY, Case, Expect, Nothing

_LOOP = """
    for x in data:
        loss = model(x).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
"""

CASES = (
    Case(
        name="value_gradient_normalised_in_a_parameter_hook",
        setup="""
            model = nn.Linear(2, 1, bias=False)
            model.weight.register_hook(lambda g: g / g.norm())  # <- here
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            data = [torch.rand(3, 2) for _ in range(4)]
            data[2].zero_()
        """,
        cell=_LOOP,
        truth=Expect(kind="nan", phase="backward", op=ANY, line=ANY, step=2, reproduced=ANY),
    ),
    Case(
        name="nothing_generate_with_a_language_model",
        needs="transformers",
        setup="""
            from transformers import GPT2Config, GPT2LMHeadModel
            config = GPT2Config(vocab_size=20, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
            model = GPT2LMHeadModel(config).eval()
            ids = torch.randint(1, 20, (2, 4))
        """,
        cell="""
            tokens = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=True, top_k=4, top_p=0.9, pad_token_id=0
            )
        """,
        truth=Nothing(steps=0, backwards=0),
    ),
)
