"""Where it is: nested paths, shared and copied modules, parametrizations, hooks, compiled and checkpointed parts, odd loops."""

from tests.nan_cases.case import Case, Expect

CASES = (
    Case(
        name="structure_module_that_calls_its_child_directly",
        setup="""
            class Child(nn.Module):
                def project(self, x):
                    return x.reciprocal()  # <- here
            class Parent(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.lin, self.child = nn.Linear(2, 2, bias=False), Child()
                def forward(self, x):
                    return self.child.project(self.lin(x))
            model = nn.Sequential(Parent())
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.rand(3, 2); x[1] = 0.0
        """,
        cell="model(x).tanh().sum().backward()\nopt.step()",
        # A method that is not a call: it belongs to the module that is being called. tanh hides the forward infinity, not its derivative.
        truth=Expect(kind=frozenset({"inf", "nan"}), phase=frozenset({"backward", "forward"}), op="reciprocal", module="0", rows=(1,)),
    ),
)
