"""Special functions, linear algebra, spectra, complex numbers, distributions: the poles that experts meet."""

from tests.nan_cases import slugs
from tests.nan_cases.case import ANY, Case, Expect

_IDENTITY = """
    model = nn.Linear(2, 2, bias=False)
    nn.init.eye_(model.weight)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
"""
_UPDATE = """
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def _loss(name: str, line: str, x: str, truth: Expect, *, setup: str = "", before: str = "") -> Case:
    """One step of a model that passes its input on, with a loss of one marked line."""
    lines = [f"    x = {x}", *(f"    {one}" for one in setup.splitlines())]
    cell = ["    h = model(x)", *(f"    {one}" for one in before.splitlines()), f"    {line}  # <- here"]
    return Case(name=name, setup=_IDENTITY + "\n".join(lines), cell="\n".join(cell) + _UPDATE, truth=truth)


CASES = (
    _loss(
        "science_angle_between_equal_vectors",
        "loss = torch.acos(F.cosine_similarity(h, y)).sum()",
        "torch.tensor([[1.0, 2.0], [1.0, 0.0], [-3.0, 1.0]])",
        Expect(kind="inf", phase="backward", op="acos", module=None, rows=(1,), diagnosis="pole"),
        setup="y = torch.tensor([[2.0, 1.0], [2.0, 0.0], [1.0, 1.0]])",
    ),
    _loss(
        "science_hyperbolic_distance_of_a_point_to_itself",
        "loss = torch.acosh(1 + 2 * gap / (1 - h.square().sum(1))).mean()",
        "torch.tensor([[0.1, 0.2], [0.3, 0.1]])",
        Expect(kind=frozenset({"nan", "inf"}), phase="backward", op="acosh", module=None, rows=(1,), diagnosis="pole"),
        setup="y = torch.tensor([[0.5, 0.2], [0.3, 0.1]])",
        before="gap = (h - y).square().sum(1)",
    ),
    _loss(
        "science_inverse_error_function_of_one",
        "loss = torch.erfinv(h).square().mean()",
        "torch.tensor([[0.1, 0.2], [0.3, 1.0]])",
        Expect(kind="inf", phase="loss", op="erfinv", module=None, rows=(1,), diagnosis="pole"),
    ),
    _loss(
        "science_normal_score_of_zero",
        "loss = torch.special.ndtri(h).sum()",
        "torch.tensor([[0.1, 0.2], [0.0, 0.9], [0.5, 0.5]])",
        Expect(kind="inf", phase="loss", op="special_ndtri", module=None, rows=(1,), diagnosis="pole"),
    ),
    _loss(
        "science_digamma_at_its_pole",
        "loss = (torch.digamma(h) - torch.digamma(h + 1)).sum()",
        "torch.tensor([[1.0, 2.0], [3.0, 0.0]])",
        Expect(kind="inf", phase="loss", op="digamma", module=None, rows=(1,), diagnosis="pole"),
    ),
    _loss(
        "science_entropy_function_at_zero",
        "loss = -torch.special.entr(h).sum()",
        "torch.tensor([[0.5, 0.5], [0.3, 0.7], [1.0, 0.0]])",
        Expect(kind="inf", phase="backward", op="special_entr", module=None, rows=(2,), diagnosis=slugs.LOG_ZERO),
    ),
    _loss(
        "science_remainder_by_zero",
        "loss = torch.remainder(h, period).sum()",
        "torch.tensor([[0.5, 0.5], [0.3, 0.7], [1.0, 0.0]])",
        Expect(kind="nan", phase="loss", op="remainder", module=None, rows=(1,), diagnosis=slugs.DIV_ZERO),
        setup="period = torch.tensor([[2.0], [0.0], [1.0]])",
    ),
    _loss(
        "science_inverse_square_root_of_nothing",
        "loss = (h * h.square().sum(1, keepdim=True).rsqrt()).sum()",
        "torch.tensor([[0.5, 0.5], [0.0, 0.0]])",
        Expect(kind="inf", phase="loss", op="rsqrt", module=None, rows=(1,), diagnosis=frozenset({slugs.SQRT_ZERO, slugs.DIV_ZERO})),
    ),
    _loss(
        "science_negative_power_of_zero",
        "loss = (h.abs() ** -0.5).mean()",
        "torch.tensor([[0.5, 0.5], [0.1, 0.3], [2.0, 0.0]])",
        Expect(kind="inf", phase="loss", op="pow", module=None, rows=(2,), diagnosis=slugs.POW_ZERO),
    ),
    _loss(
        "science_learned_exponent_of_a_negative_base",
        "loss = torch.pow(h, gamma).mean()",
        "torch.tensor([[0.5, 0.5], [0.1, -0.3]])",
        Expect(kind="nan", phase="loss", op="pow", module=None, rows=(1,), diagnosis="pow_negative"),
        setup="gamma = torch.tensor(1.5, requires_grad=True)",
    ),
    _loss(
        "science_logaddexp_of_two_impossible_events",
        "loss = torch.logaddexp(blocked[:, 0], blocked[:, 1])[keep].sum()",
        "torch.tensor([[0.5, 0.5], [0.1, -0.3]])",
        Expect(kind="nan", phase="backward", op="logaddexp", module=None, rows=(1,)),
        setup="keep = torch.tensor([True, False])\nwall = torch.tensor([[0.0, 0.0], [-math.inf, -math.inf]])",
        before="blocked = h + wall",
    ),
    _loss(
        "science_log_determinant_of_a_reflection",
        "loss = torch.logdet(matrices).sum()",
        "torch.tensor([[1.0, 2.0], [3.0, 4.0]])",
        Expect(kind="nan", phase="loss", op=frozenset({"where", "logdet", "_linalg_slogdet", "scalar_tensor"}), module=None, rows=(1,)),
        before="matrices = torch.diag_embed(h * torch.tensor([[1.0, 1.0], [1.0, -1.0]]))",
    ),
    _loss(
        "science_sign_and_log_determinant_of_a_singular_matrix",
        "loss = torch.linalg.slogdet(torch.diag_embed(h))[1].sum()",
        "torch.tensor([[1.0, 2.0], [0.0, 4.0], [1.0, 1.0]])",
        Expect(kind="inf", phase="loss", op="_linalg_slogdet", module=None, rows=(1,), diagnosis="degenerate_matrix"),
    ),
    _loss(
        "science_unchecked_inverse_of_a_singular_matrix",
        "loss = torch.linalg.inv_ex(torch.diag_embed(h))[0].square().sum()",
        "torch.tensor([[1.0, 2.0], [0.0, 4.0], [1.0, 1.0]])",
        Expect(kind=frozenset({"nan", "inf"}), phase="loss", op="linalg_inv_ex", module=None, rows=(1,), diagnosis="degenerate_matrix"),
    ),
    _loss(
        "science_singular_vectors_of_the_identity",
        "loss = (torch.linalg.svd(h)[0] * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum() + 0 * h.sum()",
        "torch.eye(2)",
        Expect(kind=frozenset({"nan", "inf"}), phase="backward", op="_linalg_svd", module=None, diagnosis="degenerate_matrix"),
    ),
    _loss(
        "science_matrix_exponential_overflows",
        "loss = torch.linalg.matrix_exp(torch.diag_embed(h)).sum()",
        "torch.tensor([[1.0, 2.0], [1.0, 120.0]])",
        Expect(kind=frozenset({"nan", "inf"}), phase="loss", op="linalg_matrix_exp", module=None),
    ),
    _loss(
        "science_log_spectrum_of_silence",
        "loss = torch.fft.rfft(wave).abs().log10().mean()",
        "torch.tensor([[1.0, 2.0], [0.0, 0.0], [1.0, 1.5]])",
        Expect(kind="inf", phase="loss", op="log10", module=None, rows=(1,), diagnosis=slugs.LOG_ZERO),
        before="wave = h.repeat(1, 4) * torch.arange(1.0, 9.0)",
    ),
    Case(
        name="science_phase_of_a_complex_zero",
        setup=_IDENTITY + "    x = torch.tensor([[1.0, 2.0], [0.0, 0.0], [1.0, 1.5]])",
        cell="""
            h = model(x)
            z = torch.complex(h[:, 0], h[:, 1])
            unit = z / z.abs()  # <- here
            loss = (unit - 1).abs().mean()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="nan", phase="loss", op="div", module=None, rows=(1,), diagnosis=slugs.DIV_ZERO),
    ),
    _loss(
        "science_complex_logarithm_of_zero",
        "loss = torch.log(torch.view_as_complex(h)).real.sum()",
        "torch.tensor([[1.0, 2.0], [3.0, 1.0], [0.0, 0.0]])",
        Expect(kind="inf", phase="loss", op="log", module=None, rows=(2,), diagnosis=slugs.LOG_ZERO),
    ),
    Case(
        name="science_all_actions_are_illegal",
        setup=_IDENTITY
        + """
    x = torch.tensor([[0.5, 0.5], [0.1, 0.3]])
    legal = torch.tensor([[True, True], [False, False]])
    actions, returns = torch.tensor([0, 1]), torch.tensor([1.0, -1.0])
""",
        cell="""
            logits = model(x).masked_fill(~legal, -math.inf)
            policy = torch.distributions.Categorical(logits=logits, validate_args=False)  # <- here
            loss = -(policy.log_prob(actions) * returns).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        """,
        truth=Expect(kind="nan", phase="loss", op="sub", module=None, rows=(1,), diagnosis=slugs.MASKED_ROW),
    ),
    _loss(
        "science_floor_division_by_zero",
        "loss = (h * torch.div(100.0, torch.tensor([[1.0], [0.0]]), rounding_mode='floor')).sum()",
        "torch.tensor([[0.5, 0.5], [0.0, 1.0]])",
        Expect(kind="inf", phase="loss", op="div", module=None, rows=(1,), diagnosis=slugs.DIV_ZERO),
    ),
    _loss(
        "science_labels_whose_class_weights_are_all_zero",
        "loss = F.cross_entropy(h, y, weight=torch.tensor([1.0, 0.0]))",
        "torch.tensor([[0.5, 0.5], [0.0, 1.0]])",
        Expect(
            kind="nan",
            phase="loss",
            op=frozenset({"nll_loss_forward", "nll_loss", "cross_entropy"}),
            module=None,
            diagnosis=slugs.ALL_IGNORED,
        ),
        setup="y = torch.tensor([1, 1])",
    ),
    _loss(
        "science_root_of_a_cancelled_variance",
        "loss = (h.square().mean(1) - h.mean(1).square() - 1e-12).sqrt().sum()",
        "torch.tensor([[0.5, 0.25], [3.0, 3.0]])",
        Expect(kind="nan", phase="loss", op="sqrt", module=None, rows=(1,), diagnosis="sqrt_negative"),
    ),
    _loss(
        "science_hyperbolic_tangent_inverted_at_one",
        "loss = torch.atanh(h.tanh()).sum()",
        "torch.tensor([[0.5, 0.25], [30.0, 3.0]])",
        Expect(kind="inf", phase="loss", op="atanh", module=None, rows=(1,), diagnosis="pole"),
    ),
    _loss(
        "science_qr_of_a_rank_deficient_matrix",
        "loss = (torch.linalg.qr(h)[0] * torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])).sum()",
        "torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])",
        Expect(kind=frozenset({"nan", "inf"}), phase="backward", op="linalg_qr", module=None, rows=ANY, diagnosis="degenerate_matrix"),
    ),
)
