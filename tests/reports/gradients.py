"""Backward passes that fail, and training that does not learn: what people asked, and what it was."""

from __future__ import annotations

from tests.reports.case import ReportCase

CASES: tuple[ReportCase, ...] = (
    ReportCase(
        name="minimax-step-between-two-backwards",
        source="https://github.com/thuml/Anomaly-Transformer/issues/1",
        answer="The first optimizer.step() changes the weights that the second loss still needs: step after both backward passes.",
        magic="autograd",
        cells=(
            """
            def my_kl_loss(p, q):
                res = p * (torch.log(p + 0.0001) - torch.log(q + 0.0001))
                return torch.mean(torch.sum(res, dim=-1), dim=1)

            class AnomalyAttention(nn.Module):
                def __init__(self, win_size, d_model, n_heads):
                    super().__init__()
                    self.h = n_heads
                    self.query, self.key, self.value = (nn.Linear(d_model, d_model) for _ in range(3))
                    self.sigma_projection = nn.Linear(d_model, n_heads)
                    index = torch.arange(win_size)
                    self.register_buffer("distances", (index[:, None] - index[None, :]).abs().float())

                def forward(self, x):
                    B, L, D = x.shape
                    q, k, v = (f(x).view(B, L, self.h, -1) for f in (self.query, self.key, self.value))
                    scores = torch.einsum("blhe,bshe->bhls", q, k)
                    series = torch.softmax(scores / math.sqrt(D // self.h), dim=-1)
                    sigma = self.sigma_projection(x).transpose(1, 2)
                    sigma = torch.pow(3, torch.sigmoid(sigma * 5) + 1e-5) - 1
                    sigma = sigma.unsqueeze(-1).repeat(1, 1, 1, L)
                    prior = 1.0 / (math.sqrt(2 * math.pi) * sigma) * torch.exp(-self.distances ** 2 / 2 / (sigma ** 2))
                    return torch.einsum("bhls,bshd->blhd", series, v).reshape(B, L, -1), series, prior

            class AnomalyTransformer(nn.Module):
                def __init__(self, win_size, enc_in, c_out, d_model=64, n_heads=4, e_layers=2):
                    super().__init__()
                    self.embedding = nn.Linear(enc_in, d_model)
                    self.encoder = nn.ModuleList(AnomalyAttention(win_size, d_model, n_heads) for _ in range(e_layers))
                    self.projection = nn.Linear(d_model, c_out, bias=True)

                def forward(self, x):
                    x = self.embedding(x)
                    series_list, prior_list = [], []
                    for layer in self.encoder:
                        new, series, prior = layer(x)
                        x = x + new
                        series_list.append(series)
                        prior_list.append(prior)
                    return self.projection(x), series_list, prior_list  # <- saved
            """,
            """
            class Solver:
                def __init__(self, win_size=50, channels=38, k=3):
                    self.win_size, self.k = win_size, k
                    self.model = AnomalyTransformer(win_size, channels, channels)
                    self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
                    self.criterion = nn.MSELoss()
                    self.train_loader = DataLoader(TensorDataset(torch.randn(64, win_size, channels)), batch_size=16)

                def normalized(self, prior):
                    return prior / torch.unsqueeze(torch.sum(prior, dim=-1), dim=-1).repeat(1, 1, 1, self.win_size)

                def train(self):
                    self.model.train()
                    for i, (input_data,) in enumerate(self.train_loader):
                        self.optimizer.zero_grad()
                        output, series, prior = self.model(input_data)
                        series_loss = 0.0
                        prior_loss = 0.0
                        for u in range(len(prior)):
                            series_loss += (torch.mean(my_kl_loss(series[u], self.normalized(prior[u]).detach()))
                                            + torch.mean(my_kl_loss(self.normalized(prior[u]).detach(), series[u])))
                            prior_loss += (torch.mean(my_kl_loss(self.normalized(prior[u]), series[u].detach()))
                                           + torch.mean(my_kl_loss(series[u].detach(), self.normalized(prior[u]))))
                        rec_loss = self.criterion(output, input_data)
                        loss1 = rec_loss - self.k * series_loss
                        loss2 = rec_loss + self.k * prior_loss

                        # Minimax strategy
                        loss1.backward(retain_graph=True)
                        self.optimizer.step()  # <- here
                        loss2.backward()
                        self.optimizer.step()
            """,
            """
            %%autograd -o r
            solver = Solver()
            solver.train()
            """,
        ),
        op=("addmm", "mm", "linear", "t", "_unsafe_view", "view", "bmm"),
        module=("projection",),
        says=(r"\bkind inplace\b", r"\btensor projection\.weight\b", r"\bwriter (_foreach\w*|_fused\w*|addcdiv_)"),
        fix=r"move .*step\(\).* below .*loss2\.backward\(\)",
        fixed=(("loss1.backward(retain_graph=True)\n            self.optimizer.step()", "loss1.backward(retain_graph=True)"),),
        works="solver.optimizer.state[solver.model.projection.weight]['step'] == 4",
    ),
    ReportCase(
        name="soft-actor-critic-steps-the-critics-first",
        source="https://github.com/rail-berkeley/rlkit/pull/109",
        answer="The critics' weights were changed before the actor's backward pass through them: optimize the actor first.",
        magic="autograd",
        cells=(
            """
            def mlp(i, o, h=64):
                return nn.Sequential(nn.Linear(i, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, o))

            class TanhGaussianPolicy(nn.Module):
                def __init__(self, obs_dim, action_dim):
                    super().__init__()
                    self.net = mlp(obs_dim, 2 * action_dim)

                def forward(self, obs):
                    mean, log_std = self.net(obs).chunk(2, dim=1)
                    normal = torch.distributions.Normal(mean, log_std.clamp(-20, 2).exp())
                    z = normal.rsample()
                    action = torch.tanh(z)
                    log_pi = (normal.log_prob(z) - torch.log(1 - action.pow(2) + 1e-6)).sum(1, keepdim=True)
                    return action, log_pi

            class FlattenMlp(nn.Module):
                def __init__(self, i, o):
                    super().__init__()
                    self.net = mlp(i, o)

                def forward(self, *inputs):
                    return self.net(torch.cat(inputs, dim=1))  # <- saved

            class SACTrainer:
                def __init__(self, obs_dim=17, action_dim=6):
                    self.policy = TanhGaussianPolicy(obs_dim, action_dim)
                    self.qf1, self.qf2, self.target_qf1, self.target_qf2 = (FlattenMlp(obs_dim + action_dim, 1) for _ in range(4))
                    self.log_alpha = torch.zeros(1, requires_grad=True)
                    self.alpha_optimizer = torch.optim.Adam([self.log_alpha], lr=3e-4)
                    self.policy_optimizer = torch.optim.Adam(self.policy.parameters(), lr=3e-4)
                    self.qf1_optimizer = torch.optim.Adam(self.qf1.parameters(), lr=3e-4)
                    self.qf2_optimizer = torch.optim.Adam(self.qf2.parameters(), lr=3e-4)
                    self.qf_criterion = nn.MSELoss()
                    self.target_entropy, self.discount, self.tau = -float(action_dim), 0.99, 5e-3

                def train_from_torch(self, batch):
                    rewards, terminals, obs, actions, next_obs = batch
                    new_obs_actions, log_pi = self.policy(obs)
                    alpha_loss = -(self.log_alpha * (log_pi + self.target_entropy).detach()).mean()
                    self.alpha_optimizer.zero_grad()
                    alpha_loss.backward()
                    self.alpha_optimizer.step()
                    alpha = self.log_alpha.exp()
                    q_new_actions = torch.min(self.qf1(obs, new_obs_actions), self.qf2(obs, new_obs_actions))
                    policy_loss = (alpha * log_pi - q_new_actions).mean()

                    q1_pred, q2_pred = self.qf1(obs, actions), self.qf2(obs, actions)
                    with torch.no_grad():
                        new_next_actions, new_log_pi = self.policy(next_obs)
                        target_q = torch.min(self.target_qf1(next_obs, new_next_actions), self.target_qf2(next_obs, new_next_actions))
                        q_target = rewards + (1. - terminals) * self.discount * (target_q - alpha * new_log_pi)
                    qf1_loss = self.qf_criterion(q1_pred, q_target)
                    qf2_loss = self.qf_criterion(q2_pred, q_target)

                    self.qf1_optimizer.zero_grad()
                    qf1_loss.backward()
                    self.qf1_optimizer.step()  # <- here

                    self.qf2_optimizer.zero_grad()
                    qf2_loss.backward()
                    self.qf2_optimizer.step()  # <- here

                    self.policy_optimizer.zero_grad()
                    policy_loss.backward()
                    self.policy_optimizer.step()
                    for q, target in ((self.qf1, self.target_qf1), (self.qf2, self.target_qf2)):
                        for p, t in zip(q.parameters(), target.parameters()):
                            t.data.copy_(t.data * (1.0 - self.tau) + p.data * self.tau)

            trainer = SACTrainer()
            """,
            """
            %%autograd -o r
            for _ in range(3):
                trainer.train_from_torch((torch.randn(256, 1), torch.zeros(256, 1), torch.randn(256, 17), torch.rand(256, 6) * 2 - 1,
                                          torch.randn(256, 17)))
            """,
        ),
        op=("addmm", "mm", "linear", "t"),
        module=("net.4",),
        says=(r"\bkind inplace\b", r"\btensor net\.4\.weight\b"),
        fix=r"qf1_optimizer\.step\(\)[\s\S]*qf2_optimizer\.step\(\)[\s\S]*below .*policy_loss\.backward\(\)",
        fixed=(
            ("        self.qf1_optimizer.step()  # <- here\n", ""),
            ("        self.qf2_optimizer.step()  # <- here\n", ""),
            (
                "        policy_loss.backward()\n",
                "        policy_loss.backward()\n        self.qf1_optimizer.step()\n        self.qf2_optimizer.step()\n",
            ),
        ),
    ),
    ReportCase(
        name="two-tier-multiple-instance-learning",
        source="https://github.com/hrzhang1123/DTFD-MIL/issues/8",
        answer="The first tier's weights are updated before the second tier's loss goes backward through them: step both at the end.",
        magic="autograd",
        cells=(
            """
            class Attention(nn.Module):
                def __init__(self, L=128, D=64, K=1):
                    super().__init__()
                    self.attention_V = nn.Sequential(nn.Linear(L, D), nn.Tanh())
                    self.attention_U = nn.Sequential(nn.Linear(L, D), nn.Sigmoid())
                    self.attention_weights = nn.Linear(D, K)

                def forward(self, x):
                    A = self.attention_weights(self.attention_V(x) * self.attention_U(x))
                    return F.softmax(torch.transpose(A, 1, 0), dim=1)

            class Classifier_1fc(nn.Module):
                def __init__(self, n_channels, n_classes):
                    super().__init__()
                    self.fc = nn.Linear(n_channels, n_classes)

                def forward(self, x):
                    return self.fc(x)

            class DimReduction(nn.Module):
                def __init__(self, n_channels=256, m_dim=128):
                    super().__init__()
                    self.fc1 = nn.Linear(n_channels, m_dim, bias=False)
                    self.relu1 = nn.ReLU(inplace=True)

                def forward(self, x):
                    return self.relu1(self.fc1(x))

            class Attention_with_Classifier(nn.Module):
                def __init__(self, L=128, D=64, num_cls=2):
                    super().__init__()
                    self.attention, self.classifier = Attention(L, D), Classifier_1fc(L, num_cls)

                def forward(self, x):
                    return self.classifier(torch.mm(self.attention(x), x))

            classifier, attention, dimReduction, attCls = Classifier_1fc(128, 2), Attention(), DimReduction(), Attention_with_Classifier()
            trainable_parameters = [*classifier.parameters(), *attention.parameters(), *dimReduction.parameters()]
            optimizer0 = torch.optim.Adam(trainable_parameters, lr=1e-4, weight_decay=1e-4)
            optimizer1 = torch.optim.Adam(attCls.parameters(), lr=1e-4, weight_decay=1e-4)
            ce_cri = nn.CrossEntropyLoss(reduction='none')
            slides = [(torch.randn(60, 256), torch.tensor([i % 2])) for i in range(3)]
            """,
            """
            %%autograd -o r
            numGroup = 4
            for tslide, tslideLabel in slides:
                slide_pseudo_feat, slide_sub_preds, slide_sub_labels = [], [], []
                for tindex in np.array_split(np.random.permutation(len(tslide)), numGroup):
                    slide_sub_labels.append(tslideLabel)
                    tmidFeat = dimReduction(tslide[torch.as_tensor(tindex)])
                    tAA = attention(tmidFeat).squeeze(0)
                    tattFeats = torch.einsum('ns,n->ns', tmidFeat, tAA)
                    tattFeat_tensor = torch.sum(tattFeats, dim=0).unsqueeze(0)
                    slide_sub_preds.append(classifier(tattFeat_tensor))
                    slide_pseudo_feat.append(tattFeat_tensor)
                slide_pseudo_feat = torch.cat(slide_pseudo_feat, dim=0)

                loss0 = ce_cri(torch.cat(slide_sub_preds, dim=0), torch.cat(slide_sub_labels, dim=0)).mean()
                optimizer0.zero_grad()
                loss0.backward(retain_graph=True)
                torch.nn.utils.clip_grad_norm_(trainable_parameters, 5)
                optimizer0.step()  # <- here

                gSlidePred = attCls(slide_pseudo_feat)
                loss1 = ce_cri(gSlidePred, tslideLabel).mean()
                optimizer1.zero_grad()
                loss1.backward()
                torch.nn.utils.clip_grad_norm_(attCls.parameters(), 5)
                optimizer1.step()
            """,
        ),
        says=(r"\bkind inplace\b", r"\btensor attention_weights\.weight\b"),
        fix=r"move .*optimizer0\.step\(\).* below .*loss1\.backward\(\)",
        fixed=(
            ("    optimizer0.step()  # <- here\n", ""),
            ("    loss1.backward()\n", "    loss1.backward()\n    optimizer0.step()\n"),
        ),
    ),
    ReportCase(
        name="xception-activates-in-place-what-the-shortcut-reads",
        source="https://github.com/osmr/imgclsmob/issues/13",
        answer="The body begins with nn.ReLU(inplace=True), which overwrites the input that the identity convolution saved: no inplace.",
        magic="autograd",
        cells=(
            """
            class DwsConv3x3Block(nn.Module):
                def __init__(self, in_channels, out_channels, activate):
                    super().__init__()
                    self.activate = activate
                    if self.activate:
                        self.activ = nn.ReLU(inplace=True)
                    self.dw_conv = nn.Conv2d(in_channels, in_channels, 3, padding=1, groups=in_channels, bias=False)
                    self.pw_conv = nn.Conv2d(in_channels, out_channels, 1, bias=False)
                    self.bn = nn.BatchNorm2d(out_channels)

                def forward(self, x):
                    if self.activate:
                        x = self.activ(x)  # <- here
                    x = self.dw_conv(x)
                    x = self.pw_conv(x)
                    x = self.bn(x)
                    return x

            class XceptionUnit(nn.Module):
                def __init__(self, in_channels, out_channels, stride, reps, start_with_relu=True):
                    super().__init__()
                    self.resize_identity = (in_channels != out_channels) or (stride != 1)
                    if self.resize_identity:
                        self.identity_conv = nn.Sequential(nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
                                                           nn.BatchNorm2d(out_channels))
                    self.body = nn.Sequential()
                    for i in range(reps):
                        self.body.add_module("block{}".format(i + 1), DwsConv3x3Block(
                            in_channels if i == 0 else out_channels, out_channels, activate=start_with_relu or i > 0))
                    if stride != 1:
                        self.body.add_module("pool", nn.MaxPool2d(kernel_size=3, stride=stride, padding=1))

                def forward(self, x):
                    if self.resize_identity:
                        identity = self.identity_conv(x)  # <- saved
                    else:
                        identity = torch.clone(x)
                    x = self.body(x)
                    x = x + identity
                    return x

            class Xception(nn.Module):
                def __init__(self, num_classes=10):
                    super().__init__()
                    self.features = nn.Sequential()
                    init_block = nn.Sequential(nn.Conv2d(3, 16, 3, 2, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
                    self.features.add_module("init_block", init_block)
                    for i, (a, b) in enumerate([(16, 32), (32, 64)]):
                        self.features.add_module("unit{}".format(i + 1), XceptionUnit(a, b, stride=2, reps=2, start_with_relu=i > 0))
                    self.output = nn.Linear(64, num_classes)

                def forward(self, x):
                    return self.output(self.features(x).mean((2, 3)))

            model = Xception()
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            criterion = nn.CrossEntropyLoss()
            """,
            """
            %%autograd -o r
            for i in range(2):
                output = model(torch.randn(4, 3, 64, 64))
                loss = criterion(output, torch.randint(10, (4,)))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            """,
        ),
        op=("convolution",),
        module=("features.unit2.body.block1.activ",),
        says=(r"\bkind inplace\b", r"\bwriter relu_"),
        fix=r"inplace=False",
        fixed=(("self.activ = nn.ReLU(inplace=True)", "self.activ = nn.ReLU(inplace=False)"),),
    ),
    ReportCase(
        name="residual-added-to-a-relu",
        source="https://github.com/iMED-Lab/ER-Net/pull/3",
        answer="out += residual changes the output that ReLU saved: out = out + residual.",
        magic="autograd",
        cells=(
            """
            class ResEncoder3d(nn.Module):
                def __init__(self, in_channels, out_channels):
                    super().__init__()
                    self.conv1 = nn.Conv3d(in_channels, out_channels, kernel_size=3, padding=1)
                    self.bn1 = nn.BatchNorm3d(out_channels)
                    self.conv2 = nn.Conv3d(out_channels, out_channels, kernel_size=3, padding=1)
                    self.bn2 = nn.BatchNorm3d(out_channels)
                    self.relu = nn.ReLU(inplace=False)
                    self.conv1x1 = nn.Conv3d(in_channels, out_channels, kernel_size=1)

                def forward(self, x):
                    residual = self.conv1x1(x)
                    out = self.relu(self.bn1(self.conv1(x)))
                    out = self.relu(self.bn2(self.conv2(out)))  # <- saved
                    out += residual  # <- here
                    return out

            class ER_Net(nn.Module):
                def __init__(self, classes, channels):
                    super().__init__()
                    self.encoder1 = ResEncoder3d(channels, 8)
                    self.down = nn.MaxPool3d(2)
                    self.encoder2 = ResEncoder3d(8, 16)
                    self.up = nn.ConvTranspose3d(16, 8, 2, stride=2)
                    self.final = nn.Conv3d(8, classes, 1)

                def forward(self, x):
                    x = self.encoder1(x)
                    y = self.encoder2(self.down(x))
                    return self.final(self.up(y) + x)

            net = ER_Net(2, 1)
            optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
            critrion = nn.CrossEntropyLoss()
            """,
            """
            %%autograd -o r
            for image, label in zip(torch.randn(2, 1, 1, 16, 16, 16), torch.randint(2, (2, 1, 16, 16, 16))):
                optimizer.zero_grad()
                loss = critrion(net(image), label)
                loss.backward()
                optimizer.step()
            """,
        ),
        op=("relu",),
        module=("encoder2", "encoder1"),
        says=(r"\bkind inplace\b", r"\btensor out\b", r"\bwriter add_"),
        fix=r"out = out \+ residual",
        fixed=(("out += residual", "out = out + residual"),),
    ),
    ReportCase(
        name="denormalize-writes-to-each-channel-of-a-loop",
        source="https://github.com/haofanwang/Score-CAM/issues/28",
        answer="Iterating over a tensor unbinds it, and such views cannot be written in place: assign to the channel by its index.",
        magic="autograd",
        cells=(
            """
            def apply_transforms(image):
                means, stds = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
                tensor = ((image - means[:, None, None]) / stds[:, None, None]).unsqueeze(0)
                tensor.requires_grad = True
                return tensor

            def denormalize(tensor):
                means = [0.485, 0.456, 0.406]
                stds = [0.229, 0.224, 0.225]
                denormalized = tensor.clone()

                for channel, mean, std in zip(denormalized[0], means, stds):
                    channel.mul_(std).add_(mean)  # <- here

                return denormalized

            def format_for_plotting(tensor):
                return tensor.clone().squeeze(0).permute(1, 2, 0).detach()

            image = torch.rand(3, 64, 64)
            """,
            """
            %%autograd -o r
            input_ = apply_transforms(image)
            shown = format_for_plotting(denormalize(input_))
            """,
        ),
        op=("unbind",),
        says=(r"\bkind view_inplace\b", r"\btensor channel\b", r"\bwriter mul_"),
        never=(r"`channel = channel\.mul",),  # it would no longer reach the image
        fix=r"denormalized\[0\]\[i\]\.mul_\(std\)\.add_\(mean\)",
        fixed=(
            (
                "for channel, mean, std in zip(denormalized[0], means, stds):",
                "for i, (channel, mean, std) in enumerate(zip(denormalized[0], means, stds)):",
            ),
            ("channel.mul_(std).add_(mean)  # <- here", "denormalized[0][i].mul_(std).add_(mean)"),
        ),
        works="torch.allclose(shown, image.permute(1, 2, 0), atol=1e-5)",
    ),
    ReportCase(
        name="gru-squeezes-each-state-in-a-comprehension",
        source="https://github.com/alibaba/TinyNeuralNetwork/issues/238",
        answer="squeeze_ writes the views that unbind returned: squeeze without the underscore.",
        magic="autograd",
        cells=(
            """
            class GRULayer(nn.Module):
                def __init__(self, i, h):
                    super().__init__()
                    self.cell = nn.GRUCell(i, h)

                def forward(self, x, hidden):
                    result = []
                    for step in x:
                        hidden = self.cell(step, hidden)
                        result.append(hidden)
                    return torch.stack(result, 0), hidden

            class GRU(nn.Module):
                def __init__(self, input_size, hidden_size, num_layers=2):
                    super().__init__()
                    self.num_layers = num_layers
                    self.init = nn.Linear(input_size, num_layers * hidden_size)
                    self.layers = nn.ModuleList([GRULayer(input_size if i == 0 else hidden_size, hidden_size) for i in range(num_layers)])

                def forward(self, x):
                    hidden = self.init(x.mean(0)).view(x.shape[1], 1, self.num_layers, -1)
                    hx = torch.unbind(hidden, 2)
                    hx = [(hx[idx].squeeze_(1)) for idx in range(self.num_layers)]  # <- here
                    for idx, layer in enumerate(self.layers):
                        x, hx[idx] = layer(x, hx[idx])
                    return x, torch.stack(hx, 0)

            gru = GRU(16, 32)
            optimizer = torch.optim.Adam(gru.parameters())
            """,
            """
            %%autograd -o r
            for _ in range(3):
                out, _ = gru(torch.randn(10, 4, 16))
                optimizer.zero_grad()
                out.pow(2).mean().backward()
                optimizer.step()
            """,
        ),
        op=("unbind",),
        says=(r"\bkind view_inplace\b", r"\bwriter squeeze_"),
        fix=r"hx\[idx\]\.squeeze\(1\)",
        fixed=(("squeeze_(1)", "squeeze(1)"),),
    ),
    ReportCase(
        name="full-backward-hook-before-an-inplace-relu",
        source="https://github.com/pytorch/pytorch/issues/61519",
        answer="A full backward hook makes the module's output a view of a custom Function: the ReLU behind it must not be inplace.",
        magic="autograd",
        cells=(
            """
            # Get the model
            mod = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True))
            # Hook the feature extractor
            grads = []
            def _hook_g(module, input, output):
                grads.append(output[0].data)
            mod[2].register_full_backward_hook(_hook_g)
            """,
            """
            %%autograd -o r
            out = mod(torch.rand(1, 3, 32, 32))  # <- here
            out.mean().backward()
            """,
        ),
        op=("relu_", "relu", "BackwardHookFunction"),
        module=("3",),
        says=(r"\bkind view_inplace\b", r"hook", r"\bwriter relu_"),
        fix=r"inplace=False",
        fixed=(("nn.ReLU(inplace=True)", "nn.ReLU(inplace=False)"),),
        works="len(grads) == 1",
    ),
    ReportCase(
        name="gradient-descent-on-a-batch-of-a-scale",
        source="https://github.com/BaiTheBest/SparseLLM/issues/13",
        answer="s_batch is a leaf that requires a gradient: update it out of place, or under no_grad.",
        magic="autograd",
        cells=(
            """
            hidden, tokens, s_learning_rate = 64, 512, 0.01
            s, p, up = torch.randn(hidden, tokens), torch.randn(hidden, tokens), torch.randn(hidden, tokens)
            def swish(x):
                return x * torch.sigmoid(x)
            """,
            """
            %%autograd -o r
            alpha, gamma, batch = 5.0, 5.0, 128
            for k in range(0, tokens, batch):
                chunk = slice(k, k + batch)
                s_batch = s[:, chunk].clone().detach().to(dtype=torch.float32).requires_grad_(True)
                for _ in range(2):
                    loss_s = alpha * torch.norm(p[:, chunk] - swish(s_batch) * up[:, chunk]) ** 2
                    loss_s = loss_s + gamma * torch.norm(s_batch - s[:, chunk]) ** 2
                    loss_s.backward()
                    s_batch -= s_learning_rate * s_batch.grad  # <- here
                    s_batch.grad.zero_()
                s[:, chunk] = s_batch.detach()
            """,
        ),
        says=(r"\bkind leaf_inplace\b", r"\btensor s_batch\b"),
        fix=r"with torch\.no_grad\(\): s_batch -= s_learning_rate \* s_batch\.grad",
        fixed=(
            (
                "        s_batch -= s_learning_rate * s_batch.grad  # <- here",
                "        with torch.no_grad(): s_batch -= s_learning_rate * s_batch.grad",
            ),
        ),
    ),
    ReportCase(
        name="sinusoids-written-into-an-embedding",
        source="https://github.com/Atcold/NYU-DLSP20/issues/765",
        answer="The weight of an embedding is a leaf that requires a gradient: write the sinusoids under no_grad.",
        magic="autograd",
        cells=(
            """
            def create_sinusoidal_embeddings(nb_p, dim, E):
                theta = np.array([[p / np.power(10000, 2 * (j // 2) / dim) for j in range(dim)] for p in range(nb_p)])
                E[:, 0::2] = torch.FloatTensor(np.sin(theta[:, 0::2]))  # <- here
                E[:, 1::2] = torch.FloatTensor(np.cos(theta[:, 1::2]))
                E.requires_grad = False

            class Embeddings(nn.Module):
                def __init__(self, d_model, vocab_size, max_position_embeddings, p):
                    super().__init__()
                    self.word_embeddings = nn.Embedding(vocab_size, d_model, padding_idx=1)
                    self.position_embeddings = nn.Embedding(max_position_embeddings, d_model)
                    create_sinusoidal_embeddings(nb_p=max_position_embeddings, dim=d_model, E=self.position_embeddings.weight)
                    self.LayerNorm = nn.LayerNorm(d_model, eps=1e-12)

                def forward(self, input_ids):
                    position_ids = torch.arange(input_ids.size(1))[None].expand_as(input_ids)
                    return self.LayerNorm(self.word_embeddings(input_ids) + self.position_embeddings(position_ids))
            """,
            """
            %%autograd -o r
            model = nn.Sequential(Embeddings(32, 500, 100, 0.1), nn.Flatten(), nn.Linear(20 * 32, 2))
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            for _ in range(2):
                loss = F.cross_entropy(model(torch.randint(500, (8, 20))), torch.randint(2, (8,)))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            """,
        ),
        says=(r"\bkind (view|leaf)_inplace\b", r"\btensor E\b", r"\bleaf\b"),
        fix=r"with torch\.no_grad\(\): E\[:, 0::2\] =",
        fixed=(
            ("    E[:, 0::2] = ", "    with torch.no_grad(): E[:, 0::2] = "),
            ("    E[:, 1::2] = ", "    with torch.no_grad(): E[:, 1::2] = "),
        ),
    ),
    ReportCase(
        name="sam-adds-to-the-loss-of-the-first-pass",
        source="https://github.com/davda54/sam/issues/10",
        answer="The second pass adds to the loss of the first one, whose graph is freed: set loss to 0 before the second loop.",
        magic="autograd",
        cells=(
            """
            class SAM(torch.optim.Optimizer):
                def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
                    super().__init__(params, dict(rho=rho, **kwargs))
                    self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
                    self.param_groups = self.base_optimizer.param_groups

                @torch.no_grad()
                def first_step(self, zero_grad=False):
                    grad_norm = torch.norm(torch.stack([p.grad.norm(p=2) for g in self.param_groups for p in g["params"]]), p=2)
                    for group in self.param_groups:
                        scale = group["rho"] / (grad_norm + 1e-12)
                        for p in group["params"]:
                            e_w = p.grad * scale.to(p)
                            p.add_(e_w)
                            self.state[p]["e_w"] = e_w
                    if zero_grad: self.zero_grad()

                @torch.no_grad()
                def second_step(self, zero_grad=False):
                    for group in self.param_groups:
                        for p in group["params"]:
                            p.sub_(self.state[p]["e_w"])
                    self.base_optimizer.step()
                    if zero_grad: self.zero_grad()

            class Net(nn.Module):
                def __init__(self, num_tasks=3):
                    super().__init__()
                    self.body = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
                    self.heads = nn.ModuleList(nn.Linear(128, 1) for _ in range(num_tasks))

                def forward(self, x):
                    x = self.body(x)
                    return [head(x) for head in self.heads]

            def get_loss(output, target, t):
                loss = F.binary_cross_entropy_with_logits(output[t].squeeze(1), target[:, t])
                return loss, ((output[t].squeeze(1) > 0).float() == target[:, t]).float().mean()

            num_tasks = 3
            model = Net(num_tasks)
            optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
            """,
            """
            %%autograd -o r
            loss_sum, acc_sum = np.zeros(num_tasks), np.zeros(num_tasks)
            for image, target in [(torch.randn(4, 1, 16, 16), torch.randint(2, (4, num_tasks)).float()) for _ in range(3)]:
                output = model(image)

                loss = 0
                for t in range(num_tasks):
                    loss_t, acc_t = get_loss(output, target, t)
                    loss += loss_t  # <- shared
                    loss_sum[t] += loss_t.item()
                    acc_sum[t] += acc_t.item()

                optimizer.zero_grad()
                loss.backward()  # <- first
                optimizer.first_step(zero_grad=True)
                output = model(image)

                for t in range(num_tasks):
                    loss_t, acc_t = get_loss(output, target, t)
                    loss += loss_t
                    loss_sum[t] += loss_t.item()
                    acc_sum[t] += acc_t.item()
                loss.backward()  # <- here
                optimizer.second_step(zero_grad=True)
            """,
        ),
        says=(r"\bkind second_backward\b", r"\btensor loss\b"),
        never=(r"loss \+ loss",),
        fix=r"loss = 0|new sum|start .*0|detach",
        fixed=(("    output = model(image)\n\n    for t", "    output = model(image)\n    loss = 0\n    for t"),),
    ),
    ReportCase(
        name="gdpp-loss-behind-the-generators",
        source="https://github.com/facebookresearch/pytorch_GAN_zoo/issues/83",
        answer="The GDPP loss goes backward through the fakes whose graph the adversarial loss has freed: retain it, or add the losses.",
        magic="autograd",
        cells=(
            """
            class GNet(nn.Module):
                def __init__(self, latent=64, channels=16):
                    super().__init__()
                    self.main = nn.Sequential(nn.ConvTranspose2d(latent, channels * 2, 4), nn.BatchNorm2d(channels * 2), nn.ReLU(),
                                              nn.ConvTranspose2d(channels * 2, channels, 4, 2, 1), nn.BatchNorm2d(channels), nn.ReLU(),
                                              nn.ConvTranspose2d(channels, 3, 4, 2, 1), nn.Tanh())

                def forward(self, x):
                    return self.main(x[:, :, None, None])

            class DNet(nn.Module):
                def __init__(self, channels=16):
                    super().__init__()
                    self.main = nn.Sequential(nn.Conv2d(3, channels, 4, 2, 1), nn.LeakyReLU(0.2),
                                              nn.Conv2d(channels, channels * 2, 4, 2, 1), nn.LeakyReLU(0.2))
                    self.decisionLayer = nn.Linear(channels * 2 * 16, 1)

                def forward(self, x, getFeature=False):
                    x = self.main(x).flatten(1)  # <- shared
                    return (self.decisionLayer(x), x) if getFeature else self.decisionLayer(x)

            def GDPPLoss(phiFake, phiReal):
                def computeDiversity(phi):
                    phi = F.normalize(phi, p=2, dim=1)
                    SB = torch.mm(phi, phi.t())
                    return torch.linalg.eigh(SB)
                eigValF, eigVecF = computeDiversity(phiFake)
                eigValR, eigVecR = computeDiversity(phiReal)
                return F.mse_loss(eigValF, eigValR) - (eigVecF * eigVecR).abs().sum(0).mean()

            class BaseGAN:
                def __init__(self):
                    self.netG, self.netD = GNet(), DNet()
                    self.optimizerG = torch.optim.Adam(self.netG.parameters(), betas=(0.0, 0.99), lr=1e-3)
                    self.optimizerD = torch.optim.Adam(self.netD.parameters(), betas=(0.0, 0.99), lr=1e-3)
                    self.criterion = nn.BCEWithLogitsLoss()

                def optimizeParameters(self, real):
                    n = len(real)
                    # Update the discriminator
                    self.optimizerD.zero_grad()
                    predRealD = self.netD(real)
                    lossD = self.criterion(predRealD, torch.ones(n, 1))
                    fake = self.netG(torch.randn(n, 64)).detach()
                    predFakeD = self.netD(fake)
                    lossD = lossD + self.criterion(predFakeD, torch.zeros(n, 1))
                    lossD.backward()
                    self.optimizerD.step()

                    # Update the generator
                    self.optimizerG.zero_grad()
                    self.optimizerD.zero_grad()
                    inputNoise = torch.randn(n, 64)
                    inputFake = self.netG(inputNoise)
                    predFakeD, phiGFake = self.netD(inputFake, True)  # <- shared
                    lossGFake = self.criterion(predFakeD, torch.ones(n, 1))
                    lossGFake.backward()  # <- first
                    _, phiDReal = self.netD(real, True)
                    lossGDPP = GDPPLoss(phiGFake, phiDReal.detach())
                    lossGDPP.backward()  # <- here
                    self.optimizerG.step()

            gan = BaseGAN()
            """,
            """
            %%autograd -o r
            for _ in range(2):
                gan.optimizeParameters(torch.rand(8, 3, 16, 16) * 2 - 1)
            """,
        ),
        says=(r"\bkind second_backward\b",),
        fix=r"retain_graph=True|lossGFake \+ lossGDPP",
        fixed=(("lossGFake.backward()", "lossGFake.backward(retain_graph=True)"),),
    ),
    ReportCase(
        name="maml-with-one-inner-step",
        source="https://github.com/dragen1860/MAML-Pytorch/issues/40",
        answer="With one inner step losses_q[-1] is losses_q[1], which was computed under no_grad: compute it with gradients.",
        magic="autograd",
        cells=(
            """
            class Learner(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.vars = nn.ParameterList([nn.Parameter(torch.randn(32, 28 * 28) * 0.05), nn.Parameter(torch.zeros(32)),
                                                  nn.Parameter(torch.randn(5, 32) * 0.1), nn.Parameter(torch.zeros(5))])

                def forward(self, x, vars=None, bn_training=True):
                    if vars is None:
                        vars = self.vars
                    x = F.relu(F.linear(x.flatten(1), vars[0], vars[1]), inplace=True)
                    return F.linear(x, vars[2], vars[3])

                def parameters(self):
                    return self.vars

            class Meta(nn.Module):
                def __init__(self, update_step, update_lr=0.4, meta_lr=1e-3):
                    super().__init__()
                    self.update_step, self.update_lr = update_step, update_lr
                    self.net = Learner()
                    self.meta_optim = torch.optim.Adam(self.net.parameters(), lr=meta_lr)

                def forward(self, x_spt, y_spt, x_qry, y_qry):
                    task_num = x_spt.size(0)
                    losses_q = [0 for _ in range(self.update_step + 1)]
                    corrects = [0 for _ in range(self.update_step + 1)]
                    for i in range(task_num):
                        # 1. run the i-th task and compute loss for k=0
                        logits = self.net(x_spt[i], vars=None, bn_training=True)
                        loss = F.cross_entropy(logits, y_spt[i])
                        grad = torch.autograd.grad(loss, self.net.parameters())
                        fast_weights = list(map(lambda p: p[1] - self.update_lr * p[0], zip(grad, self.net.parameters())))
                        # this is the loss and accuracy before first update
                        with torch.no_grad():
                            logits_q = self.net(x_qry[i], self.net.parameters(), bn_training=True)
                            loss_q = F.cross_entropy(logits_q, y_qry[i])
                            losses_q[0] += loss_q
                            corrects[0] += torch.eq(F.softmax(logits_q, dim=1).argmax(dim=1), y_qry[i]).sum().item()
                        # this is the loss and accuracy after the first update
                        with torch.no_grad():  # <- here
                            logits_q = self.net(x_qry[i], fast_weights, bn_training=True)
                            loss_q = F.cross_entropy(logits_q, y_qry[i])
                            losses_q[1] += loss_q
                            corrects[1] += torch.eq(F.softmax(logits_q, dim=1).argmax(dim=1), y_qry[i]).sum().item()
                        for k in range(1, self.update_step):
                            logits = self.net(x_spt[i], fast_weights, bn_training=True)
                            loss = F.cross_entropy(logits, y_spt[i])
                            grad = torch.autograd.grad(loss, fast_weights)
                            fast_weights = list(map(lambda p: p[1] - self.update_lr * p[0], zip(grad, fast_weights)))
                            logits_q = self.net(x_qry[i], fast_weights, bn_training=True)
                            loss_q = F.cross_entropy(logits_q, y_qry[i])
                            losses_q[k + 1] += loss_q
                    # sum over all losses on query set across all tasks
                    loss_q = losses_q[-1] / task_num
                    self.meta_optim.zero_grad()
                    loss_q.backward()
                    self.meta_optim.step()

            maml = Meta(update_step=1)
            """,
            """
            %%autograd -o r
            for step in range(2):
                x_spt, y_spt = torch.randn(4, 5, 1, 28, 28), torch.arange(5).repeat(4, 1)
                maml(x_spt, y_spt, torch.randn(4, 15, 1, 28, 28), torch.arange(5).repeat(4, 3))
            """,
        ),
        says=(r"\bkind cut\b", r"no_grad"),
        fix=r"no_grad",
        fixed=(
            (
                "            # this is the loss and accuracy after the first update\n            with torch.no_grad():",
                "            # this is the loss and accuracy after the first update\n            if True:",
            ),
        ),
    ),
    ReportCase(
        name="all-of-the-network-is-frozen-for-finetuning",
        source="https://github.com/cfzd/Ultra-Fast-Lane-Detection/issues/282",
        answer="The loop freezes all parameters, the head's too: freeze those of the backbone, net.model, alone.",
        magic="autograd",
        cells=(
            """
            class ParsingNet(nn.Module):
                def __init__(self, cls_dim=(21, 9, 2)):
                    super().__init__()
                    self.cls_dim, total = cls_dim, int(np.prod(cls_dim))
                    self.model = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(),
                                               nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(4))
                    self.pool = nn.Conv2d(32, 8, 1)
                    self.cls = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, total))

                def forward(self, x):
                    return self.cls(self.pool(self.model(x)).view(-1, 128)).view(-1, *self.cls_dim)

            net = ParsingNet()
            """,
            """
            finetune = True
            if finetune:
                state_clip = {k: v for k, v in net.state_dict().items() if 'model' in k}  # only use backbone parameters
                net.load_state_dict(state_clip, strict=False)
                for param in net.parameters():
                    param.requires_grad = False  # <- here
            """,
            """
            %%autograd -o r
            optimizer = torch.optim.Adam(net.parameters(), lr=4e-4)
            for _ in range(2):
                cls_out = net(torch.randn(4, 3, 48, 96))
                loss = F.cross_entropy(cls_out, torch.randint(21, (4, 9, 2)))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            """,
        ),
        says=(r"\bkind cut\b", r"frozen", r"parameters .*model\.0\.weight.*cls\.2\.bias"),
        fix=r"requires_grad = True",
        fixed=(("%%autograd -o r\n", "%%autograd -o r\nfor part in (net.pool, net.cls): part.requires_grad_(True)\n"),),
    ),
    ReportCase(
        name="grpo-scores-what-inference-mode-generated",
        source="https://github.com/jingyaogong/minimind/issues/754",
        answer="The generated ids are inference tensors: clone them before they are scored, or generate under no_grad.",
        magic="autograd",
        cells=(
            """
            class MiniMind(nn.Module):
                def __init__(self, vocab=64, dim=32):
                    super().__init__()
                    self.embed_tokens, self.lm_head = nn.Embedding(vocab, dim), nn.Linear(dim, vocab)
                    self.rnn = nn.GRU(dim, dim, batch_first=True)

                def forward(self, input_ids):
                    return self.lm_head(self.rnn(self.embed_tokens(input_ids))[0])

                @torch.inference_mode()
                def generate(self, inputs, max_new_tokens):
                    ids = inputs
                    for _ in range(max_new_tokens):
                        probs = torch.softmax(self(ids)[:, -1], dim=-1)
                        ids = torch.cat([ids, torch.multinomial(probs, 1)], dim=1)
                    return ids

            model = MiniMind()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            """,
            """
            %%autograd -o r
            for step in range(2):
                prompt_ids = torch.randint(64, (4, 6))
                outputs = model.generate(prompt_ids.repeat_interleave(2, dim=0), max_new_tokens=8)
                completion_ids = outputs[:, 6:]
                rewards = completion_ids.float().mean(1)
                advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
                logits = model(outputs)[:, :-1, :]  # <- here
                per_token_logps = F.log_softmax(logits, dim=-1).gather(2, outputs[:, 1:].unsqueeze(-1)).squeeze(-1)
                loss = -(per_token_logps[:, 5:] * advantages.unsqueeze(1)).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            """,
        ),
        says=(r"\bkind inference_tensor\b", r"\btensor outputs\b", r"inference_mode"),
        fix=r"outputs = outputs\.clone\(\)|outputs\.clone\(\)",
        fixed=(
            ("max_new_tokens=8)\n", "max_new_tokens=8)\n    outputs = outputs.clone()\n"),
            ("rewards = completion", "rewards = completion"),
        ),
    ),
    ReportCase(
        name="stochastic-sign-of-a-compression-network",
        source="https://github.com/1zb/pytorch-image-comp-rnn/issues/4",
        answer="forward has two inputs, backward returns one gradient: return grad_output, None.",
        magic="autograd",
        cells=(
            """
            class SignFunction(torch.autograd.Function):
                @staticmethod
                def forward(ctx, input, is_training=True):
                    # Apply quantization noise while only training
                    if is_training:
                        prob = input.new(input.size()).uniform_()
                        x = input.clone()
                        x[(1 - input) / 2 <= prob] = 1
                        x[(1 - input) / 2 > prob] = -1
                        return x
                    else:
                        return input.sign()

                @staticmethod
                def backward(ctx, grad_output):
                    return grad_output  # <- here

            class Sign(nn.Module):
                def forward(self, x):
                    return SignFunction.apply(x, self.training)

            class Binarizer(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.conv = nn.Conv2d(32, 8, kernel_size=1, bias=False)
                    self.sign = Sign()

                def forward(self, input):
                    return self.sign(torch.tanh(self.conv(input)))

            encoder, binarizer, decoder = nn.Conv2d(3, 32, 3, 2, 1), Binarizer(), nn.ConvTranspose2d(8, 3, 2, 2)
            solver = torch.optim.Adam([{'params': m.parameters()} for m in (encoder, binarizer, decoder)], lr=5e-4)
            """,
            """
            %%autograd -o r
            for batch in range(2):
                res = torch.rand(4, 3, 32, 32) - 0.5
                losses = []
                solver.zero_grad()
                for _ in range(3):
                    output = decoder(binarizer(encoder(res)))
                    res = res - output
                    losses.append(res.abs().mean())
                loss = sum(losses) / 3
                loss.backward()
                solver.step()
            """,
        ),
        op=("SignFunction", "Sign"),
        says=(r"\bkind custom_function\b", r"\b2\b", "None"),
        fix=r"return 2 values|return grad_output, None",
        fixed=(("    return grad_output  # <- here", "    return grad_output, None"),),
    ),
    ReportCase(
        name="maml-of-a-vit-with-its-pooler",
        source="https://github.com/learnables/learn2learn/issues/363",
        answer="The pooler of the ViT is not used by the loss: allow_unused=True, or a model without a pooler.",
        magic="autograd",
        needs="transformers",
        cells=(
            """
            from transformers import ViTConfig, ViTModel

            class ViTClassifier(nn.Module):
                def __init__(self, num_classes):
                    super().__init__()
                    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32,
                                       patch_size=8)
                    self.model = ViTModel(config)
                    self.cls = nn.Linear(32, num_classes)

                def forward(self, x):
                    return self.cls(self.model(x).last_hidden_state[:, 0, :])

            class MAML:
                def __init__(self, model, lr, first_order=False):
                    self.module, self.lr, self.first_order = model, lr, first_order

                def adapt(self, loss, allow_unused=False):
                    second_order = not self.first_order
                    gradients = torch.autograd.grad(loss,  # <- here
                                                    self.module.parameters(),
                                                    retain_graph=second_order,
                                                    create_graph=second_order,
                                                    allow_unused=allow_unused)
                    return [p if g is None else p - self.lr * g for p, g in zip(self.module.parameters(), gradients)]

            model = ViTClassifier(5)
            maml = MAML(model, lr=0.1)
            """,
            """
            %%autograd -o r
            support, labels = torch.randn(5, 3, 32, 32), torch.arange(5)
            error = F.cross_entropy(model(support), labels)
            fast_weights = maml.adapt(error)
            """,
        ),
        says=(r"\bkind unused_input\b", r"parameters .*model\.pooler\.dense\.weight.*model\.pooler\.dense\.bias"),
        fix=r"allow_unused=True",
        fixed=(("maml.adapt(error)", "maml.adapt(error, allow_unused=True)"),),
        works="len(fast_weights) == len(list(model.parameters()))",
    ),
    ReportCase(
        name="integer-weights-want-a-gradient",
        source="https://github.com/pytorch/pytorch/issues/10065",
        answer="Make the tensor float when it is created: torch.tensor([1, 2, 3], requires_grad=True, dtype=torch.float).",
        magic="autograd",
        cells=(
            """
            %%autograd -o r
            w = torch.tensor([1, 2, 3], requires_grad=True)  # <- here
            w1 = w.type(torch.float)
            o = torch.mean(w1)
            o.backward()
            """,
        ),
        says=(r"\bkind integer_grad\b", r"\btensor w\b"),
        fix=r"torch\.tensor\(\[1, 2, 3\], .*dtype=torch\.float",
        fixed=(("torch.tensor([1, 2, 3], requires_grad=True)", "torch.tensor([1, 2, 3], dtype=torch.float32, requires_grad=True)"),),
        works="w.grad is not None",
    ),
    ReportCase(
        name="scaled-synthetic-images-are-no-leaf",
        source="https://github.com/pytorch/pytorch/issues/140469",
        answer="Times 0.01 makes a tensor that is no leaf: scale first, then require the gradient.",
        magic="autograd",
        cells=(
            """
            num_classes, dlipc, channel, im_size = 10, 1, 3, (16, 16)
            net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
            """,
            """
            %%autograd -o r
            size = (num_classes * dlipc, channel, im_size[0], im_size[1])
            image_syn = torch.randn(size=size, dtype=torch.float, requires_grad=True) * 0.01  # <- here
            label_syn = torch.arange(num_classes)
            optimizer_img = torch.optim.SGD([image_syn, ], lr=0.1, momentum=0.5)
            for it in range(2):
                loss = F.cross_entropy(net(image_syn), label_syn)
                optimizer_img.zero_grad()
                loss.backward()
                optimizer_img.step()
            """,
        ),
        op=("mul",),
        says=(r"\bkind other\b", r"\btensor image_syn\b", "leaf"),
        fix=r"detach\(\)\.requires_grad_\(\)|requires_grad_\(\)",
        fixed=((" * 0.01  # <- here", " * 0.01\nimage_syn = image_syn.detach().requires_grad_()"),),
        works="image_syn.grad is not None",
    ),
    ReportCase(
        name="ner-criterion-keeps-a-loss-a-token",
        source="https://github.com/z814081807/DeepNER/issues/19",
        answer="CrossEntropyLoss(reduction='none') returns a loss a token: use the default, the mean.",
        magic="autograd",
        cells=(
            """
            class SpanModel(nn.Module):
                def __init__(self, num_tags, loss_type='ce'):
                    super().__init__()
                    self.bert = nn.Sequential(nn.Embedding(100, 32), nn.LayerNorm(32))
                    self.start_fc, self.end_fc = nn.Linear(32, num_tags), nn.Linear(32, num_tags)
                    reduction = 'none'
                    if loss_type == 'ce':
                        self.criterion = nn.CrossEntropyLoss(reduction=reduction)

                def forward(self, token_ids, attention_masks, start_ids, end_ids):
                    seq_out = self.bert(token_ids)
                    start_logits, end_logits = self.start_fc(seq_out), self.end_fc(seq_out)
                    start_logits = start_logits.view(-1, start_logits.size(-1))
                    end_logits = end_logits.view(-1, end_logits.size(-1))
                    active_loss = attention_masks.view(-1) == 1
                    start_loss = self.criterion(start_logits[active_loss], start_ids.view(-1)[active_loss])  # <- here
                    end_loss = self.criterion(end_logits[active_loss], end_ids.view(-1)[active_loss])  # <- here
                    loss = start_loss + end_loss  # <- here
                    return (loss, start_logits, end_logits)

            model = SpanModel(5)
            optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
            """,
            """
            %%autograd -o r
            for step in range(2):
                batch = [torch.randint(100, (4, 12)), torch.ones(4, 12), torch.randint(5, (4, 12)), torch.randint(5, (4, 12))]
                loss = model(*batch)[0]
                model.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            """,
        ),
        op=("add", "nll_loss_forward", "nll_loss"),
        says=(r"\bkind non_scalar\b", r"\btensor loss\b", r"48"),
        fix=r"mean",
        fixed=(("    loss.backward()", "    loss.mean().backward()"),),
    ),
    ReportCase(
        name="gradients-are-zeroed-before-there-are-any",
        source="https://github.com/jcjohnson/pytorch-examples/issues/7",
        answer="w1.grad is None until backward() has run: zero the gradients at the end of the loop.",
        magic="autograd",
        cells=(
            """
            N, D_in, H, D_out = 64, 100, 50, 10
            x, y = torch.randn(N, D_in), torch.randn(N, D_out)
            w1 = torch.randn(D_in, H, requires_grad=True)
            w2 = torch.randn(H, D_out, requires_grad=True)
            """,
            """
            %%autograd -o r
            learning_rate = 1e-6
            for t in range(5):
                y_pred = x.mm(w1).clamp(min=0).mm(w2)
                loss = (y_pred - y).pow(2).sum()

                # Manually zero the gradients before running the backward pass
                w1.grad.data.zero_()  # <- here
                w2.grad.data.zero_()

                loss.backward()
                w1.data -= learning_rate * w1.grad.data
                w2.data -= learning_rate * w2.grad.data
            """,
        ),
        says=(r"\bkind other\b", r"\btensor w1\b", "None"),
        fix=r"backward\(\)",
        fixed=(
            ("    w1.grad.data.zero_()  # <- here\n    w2.grad.data.zero_()\n", ""),
            (
                "    w2.data -= learning_rate * w2.grad.data\n",
                "    w2.data -= learning_rate * w2.grad.data\n    w1.grad.data.zero_()\n    w2.grad.data.zero_()\n",
            ),
        ),
    ),
    ReportCase(
        name="the-down-sampling-layer-is-in-no-group",
        source="https://github.com/ohhhyeahhh/SiamCAR/issues/18",
        answer="The parameters of model.down were forgotten in the groups of the optimizer: add them.",
        magic="autograd",
        cells=(
            """
            class ModelBuilder(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 24, 3, 2, 1))
                    self.neck = nn.Conv2d(24, 24, 1)
                    self.down = nn.ConvTranspose2d(24, 8, 1, 1)
                    self.car_head = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 2, 3, 1, 1))

                def forward(self, data):
                    zf, xf = self.neck(self.backbone(data["template"])), self.neck(self.backbone(data["search"]))
                    kernel = zf.flatten(0, 1).unsqueeze(1)
                    features = F.conv2d(xf.flatten(0, 1).unsqueeze(0), kernel, groups=kernel.shape[0], padding=2)
                    features = self.down(features.view(len(zf), 24, *features.shape[-2:]))
                    cls = self.car_head(features)
                    return F.cross_entropy(cls, data["label"][:, :cls.shape[2], :cls.shape[3]])

            def build_opt_lr(model, current_epoch=0):
                trainable_params = []
                trainable_params += [{'params': filter(lambda x: x.requires_grad,
                                                       model.backbone.parameters()),
                                      'lr': 0.1 * 0.005}]
                trainable_params += [{'params': model.neck.parameters(),
                                      'lr': 0.005}]
                trainable_params += [{'params': model.car_head.parameters(),
                                      'lr': 0.005}]

                optimizer = torch.optim.SGD(trainable_params,  # <- here
                                            momentum=0.9,
                                            weight_decay=0.0001)
                return optimizer
            """,
            """
            %%autograd -o r
            model = ModelBuilder().train()
            optimizer = build_opt_lr(model)
            for idx in range(4):
                data = {"template": torch.rand(2, 3, 16, 16), "search": torch.rand(2, 3, 32, 32), "label": torch.randint(2, (2, 32, 32))}
                loss = model(data)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            """,
        ),
        says=(r"\bkind not_in_optimizer\b", r"parameters down\.weight, down\.bias\n"),
        fix=r"down\.weight",
        fixed=(
            (
                "    optimizer = torch.optim.SGD(trainable_params,",
                """    trainable_params += [{'params': model.down.parameters(), 'lr': 0.005}]
    optimizer = torch.optim.SGD(trainable_params,""",
            ),
        ),
    ),
    ReportCase(
        name="one-discriminator-twice-the-other-never",
        source="https://github.com/line/open-universe/issues/5",
        answer="The list holds loss_mrd's parameters twice and loss_mpd's never: the second must be loss_mpd.",
        magic="autograd",
        cells=(
            """
            class MultiResolution(nn.Module):
                def __init__(self, strides):
                    super().__init__()
                    nets = [nn.Sequential(nn.Conv1d(1, 8, 15, s, 7), nn.LeakyReLU(0.1), nn.Conv1d(8, 1, 3, 1, 1)) for s in strides]
                    self.nets = nn.ModuleList(nets)

                def forward(self, x):
                    return [net(x) for net in self.nets]

            class UniverseGAN(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.score_model = nn.Sequential(nn.Conv1d(1, 16, 9, 1, 4), nn.PReLU(), nn.Conv1d(16, 1, 9, 1, 4))
                    self.loss_mrd = MultiResolution((2, 4))
                    self.loss_mpd = MultiResolution((3, 5))

                def configure_optimizers(self):
                    opt_score = torch.optim.AdamW(self.score_model.parameters(), lr=1e-4)
                    params_disc = list(self.loss_mrd.parameters()) + list(  # <- here
                        self.loss_mrd.parameters()  # <- here
                    )
                    opt_disc = torch.optim.AdamW(params_disc, lr=1e-4)  # <- here
                    return opt_score, opt_disc

                def compute_disc_loss(self, target, est):
                    loss = 0.0
                    for disc in (self.loss_mrd, self.loss_mpd):
                        for real, fake in zip(disc(target), disc(est)):
                            loss = loss + ((real - 1) ** 2).mean() + (fake ** 2).mean()
                    return loss

                def compute_gen_loss(self, target, est):
                    adv = sum(((fake - 1) ** 2).mean() for disc in (self.loss_mrd, self.loss_mpd) for fake in disc(est))
                    return adv + 45 * F.l1_loss(est, target)
            """,
            """
            %%autograd -o r
            model = UniverseGAN()
            opt_score, opt_disc = model.configure_optimizers()
            for _ in range(4):
                target = torch.randn(4, 1, 256)
                est = model.score_model(target + 0.1 * torch.randn_like(target))
                opt_disc.zero_grad()
                model.compute_disc_loss(target, est.detach()).backward()
                opt_disc.step()
                opt_score.zero_grad()
                model.compute_gen_loss(target, est).backward()
                opt_score.step()
            """,
        ),
        says=(r"\bkind not_in_optimizer\b", r"parameters loss_mpd\.nets\.0\.0\.weight, .*loss_mpd\.nets\.1\.2\.bias\n"),
        fix=r"loss_mpd",
        fixed=(("            self.loss_mrd.parameters()  # <- here\n", "            self.loss_mpd.parameters()\n"),),
    ),
    ReportCase(
        name="layers-in-a-list-of-lists",
        source="https://github.com/pytorch/pytorch/issues/715",
        answer="Modules in a Python list are not registered: wrap them in nn.ModuleList.",
        magic="autograd",
        cells=(
            """
            class SNLINet(nn.Module):
                def __init__(self, options):
                    super().__init__()
                    self.embed = nn.Embedding(options['n_words'], options['n_embed'])
                    self.hids = []  # <- here
                    indim = options['n_embed']
                    for li in range(options['n_layers']):
                        self.hids.append([  # <- here
                            nn.Linear(indim, options['n_hid']),
                            eval('nn.{}'.format(options['act']))()
                            ])
                        indim = options['n_hid']

                    self.classifier = nn.Linear(options['n_hid'], 3)

                def forward(self, x):
                    h = self.embed(x).mean(1)
                    for linear, act in self.hids:
                        h = act(linear(h))
                    return self.classifier(h)

            net = SNLINet({'n_words': 200, 'n_embed': 32, 'n_hid': 64, 'n_layers': 2, 'act': 'Tanh'})
            optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
            criterion = nn.CrossEntropyLoss()
            """,
            """
            %%autograd -o r
            for _ in range(4):
                optimizer.zero_grad()
                loss = criterion(net(torch.randint(200, (16, 9))), torch.randint(3, (16,)))
                loss.backward()
                optimizer.step()
            """,
        ),
        says=(
            r"\bkind not_in_optimizer\b",
            r"parameters hids\[0\]\[0\]\.weight, hids\[0\]\[0\]\.bias, hids\[1\]\[0\]\.weight, hids\[1\]\[0\]\.bias\n",
        ),
        fix=r"hids.*ModuleList",
        fixed=(
            ("self.hids = []", "self.hids = nn.ModuleList()"),
            ("self.hids.append([", "self.hids.append(nn.ModuleList(["),
            ("()\n                ])", "()\n                ]))"),
        ),
    ),
    ReportCase(
        name="validation-inside-the-epoch-leaves-eval-mode",
        source="https://github.com/fartashf/vsepp/issues/4",
        answer="validate() switches the encoders to evaluation mode, and nothing switches them back until the next epoch.",
        magic="autograd",
        cells=(
            """
            class EncoderImage(nn.Module):
                def __init__(self, img_dim=128, embed_size=64):
                    super().__init__()
                    self.cnn = nn.Sequential(nn.Linear(img_dim, 128), nn.ReLU(True), nn.Dropout(0.5))
                    self.fc = nn.Linear(128, embed_size)

                def forward(self, images):
                    return F.normalize(self.fc(self.cnn(images)), dim=1)

            class EncoderText(nn.Module):
                def __init__(self, vocab_size=100, word_dim=32, embed_size=64):
                    super().__init__()
                    self.embed, self.rnn = nn.Embedding(vocab_size, word_dim), nn.GRU(word_dim, embed_size, 1, batch_first=True)

                def forward(self, x):
                    return F.normalize(self.rnn(self.embed(x))[1].squeeze(0), dim=1)

            class VSE(object):
                def __init__(self):
                    self.img_enc, self.txt_enc = EncoderImage(), EncoderText()
                    self.params = [*self.txt_enc.parameters(), *self.img_enc.parameters()]
                    self.optimizer = torch.optim.Adam(self.params, lr=2e-4)
                    self.Eiters = 0

                def train_start(self):
                    self.img_enc.train()
                    self.txt_enc.train()

                def val_start(self):
                    self.img_enc.eval()
                    self.txt_enc.eval()

                def forward_emb(self, images, captions):
                    return self.img_enc(images), self.txt_enc(captions)  # <- here

                def train_emb(self, images, captions):
                    self.Eiters += 1
                    img_emb, cap_emb = self.forward_emb(images, captions)  # <- here
                    self.optimizer.zero_grad()
                    scores = img_emb @ cap_emb.t()
                    loss = (0.2 + scores - scores.diag()[:, None]).clamp(min=0).sum()
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(self.params, 2.)
                    self.optimizer.step()

            def validate(val_loader, model):
                model.val_start()
                with torch.no_grad():
                    return [model.forward_emb(*data)[0].mean() for data in val_loader]

            def train(train_loader, model, val_loader, val_step):
                model.train_start()
                for i, train_data in enumerate(train_loader):
                    model.train_emb(*train_data)  # <- here
                    # validate at every val_step
                    if model.Eiters % val_step == 0:
                        validate(val_loader, model)

            loader = DataLoader(TensorDataset(torch.randn(96, 128), torch.randint(100, (96, 7))), batch_size=8)
            """,
            """
            %%autograd -o r
            model = VSE()
            for epoch in range(2):
                train(loader, model, list(loader)[:2], val_step=4)
            """,
        ),
        says=(r"\bkind train_in_eval_mode\b", r"img_enc", r"cnn\.2 \(Dropout\)"),
        fix=r"\.train\(\)",
        fixed=(("        model.train_emb(*train_data)", "        model.train_start()\n        model.train_emb(*train_data)"),),
    ),
    ReportCase(
        name="discriminator-never-zeroes-its-gradients",
        source="https://github.com/Hsintien-Ng/idinvert_pytorch-reproduced/issues/1",
        answer="optimizer_D.zero_grad() is missing before the discriminator's backward pass.",
        magic="autograd",
        cells=(
            """
            class E(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.net = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(8 * 64, 32))
                def forward(self, x):
                    return self.net(x)

            G = nn.Sequential(nn.Linear(32, 3 * 16 * 16), nn.Tanh(), nn.Unflatten(1, (3, 16, 16))).requires_grad_(False)
            D = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(8 * 64, 1))
            encoder = E()
            optimizer_E = torch.optim.Adam(encoder.parameters(), lr=1e-4)
            optimizer_D = torch.optim.Adam(D.parameters(), lr=1e-4)

            def D_logistic_r1(real_img, generator, encoder, discriminator, gamma=10.0):
                with torch.no_grad():
                    reals_rec = generator(encoder(real_img))
                real_img = real_img.clone().requires_grad_()
                real_scores, fake_scores = discriminator(real_img), discriminator(reals_rec)
                loss_fake, loss_real = F.softplus(fake_scores).mean(), F.softplus(-real_scores).mean()
                grad_real = torch.autograd.grad(real_scores.sum(), real_img, create_graph=True)[0]
                gradient_penalty = grad_real.pow(2).flatten(1).sum(1).mean() * gamma * 0.5
                return loss_fake + loss_real + gradient_penalty

            def E_loss(real_img, generator, encoder, discriminator):
                reconstructed = generator(encoder(real_img))
                return F.mse_loss(reconstructed, real_img) + 0.1 * F.softplus(-discriminator(reconstructed)).mean()
            """,
            """
            %%autograd -o r
            for it in range(6):
                x = torch.rand(4, 3, 16, 16) * 2 - 1
                E_loss_real = E_loss(x, G, encoder, D)
                optimizer_E.zero_grad()
                E_loss_real.backward()
                nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
                optimizer_E.step()

                D_loss_real = D_logistic_r1(x, G, encoder, D)
                D_loss_real.backward()  # <- here
                optimizer_D.step()  # <- here
            """,
        ),
        says=(r"\bkind never_zeroed\b", "optimizer_D"),
        fix=r"optimizer_D\.zero_grad\(\)",
        fixed=(("    D_loss_real.backward()", "    optimizer_D.zero_grad()\n    D_loss_real.backward()"),),
    ),
    ReportCase(
        name="pixels-are-encoded-under-no-grad",
        source="https://github.com/rll-research/cic/issues/5",
        answer="The observations are encoded inside torch.no_grad, so the convolutional encoder never gets a gradient.",
        magic="autograd",
        cells=(
            """
            class Encoder(nn.Module):
                def __init__(self, obs_shape):
                    super().__init__()
                    self.convnet = nn.Sequential(nn.Conv2d(obs_shape[0], 16, 3, stride=2), nn.ReLU(),
                                                 nn.Conv2d(16, 16, 3, stride=2), nn.ReLU())
                    self.repr_dim = 16 * 5 * 5

                def forward(self, obs):
                    return self.convnet(obs / 255.0 - 0.5).flatten(1)

            class Critic(nn.Module):
                def __init__(self, obs_dim, action_dim, hidden=64):
                    super().__init__()
                    self.trunk = nn.Sequential(nn.Linear(obs_dim, hidden), nn.LayerNorm(hidden), nn.Tanh())
                    self.Q1 = nn.Sequential(nn.Linear(hidden + action_dim, hidden), nn.ReLU(), nn.Linear(hidden, 1))
                    self.Q2 = nn.Sequential(nn.Linear(hidden + action_dim, hidden), nn.ReLU(), nn.Linear(hidden, 1))

                def forward(self, obs, action):
                    h = torch.cat([self.trunk(obs), action], dim=-1)
                    return self.Q1(h), self.Q2(h)

            class CICAgent:
                def __init__(self, obs_shape=(3, 24, 24), action_dim=4):
                    self.encoder = Encoder(obs_shape)
                    self.actor = nn.Sequential(nn.Linear(self.encoder.repr_dim, 64), nn.ReLU(), nn.Linear(64, action_dim), nn.Tanh())
                    self.critic, self.critic_target = Critic(self.encoder.repr_dim, action_dim), Critic(self.encoder.repr_dim, action_dim)
                    self.encoder_opt = torch.optim.Adam(self.encoder.parameters(), lr=1e-4)
                    self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr=1e-4)
                    self.critic_opt = torch.optim.Adam(self.critic.parameters(), lr=1e-4)

                def aug_and_encode(self, obs):
                    return self.encoder(obs + torch.randint_like(obs, -2, 3))

                def update_critic(self, obs, action, reward, discount, next_obs):
                    with torch.no_grad():
                        target_V = torch.min(*self.critic_target(next_obs, self.actor(next_obs)))
                        target_Q = reward + discount * target_V
                    Q1, Q2 = self.critic(obs, action)
                    critic_loss = F.mse_loss(Q1, target_Q) + F.mse_loss(Q2, target_Q)
                    self.encoder_opt.zero_grad(set_to_none=True)
                    self.critic_opt.zero_grad(set_to_none=True)
                    critic_loss.backward()
                    self.critic_opt.step()
                    self.encoder_opt.step()

                def update_actor(self, obs):
                    actor_loss = -torch.min(*self.critic(obs, self.actor(obs))).mean()
                    self.actor_opt.zero_grad(set_to_none=True)
                    actor_loss.backward()
                    self.actor_opt.step()

                def update(self, batch):
                    obs, action, reward, discount, next_obs = batch
                    # augment and encode
                    with torch.no_grad():  # <- here
                        obs = self.aug_and_encode(obs)
                        next_obs = self.aug_and_encode(next_obs)
                    self.update_critic(obs, action, reward, discount, next_obs.detach())
                    self.update_actor(obs.detach())

            agent = CICAgent()
            """,
            """
            %%autograd -o r
            for _ in range(4):
                agent.update((torch.randint(256, (8, 3, 24, 24)).float(), torch.rand(8, 4), torch.rand(8, 1), torch.full((8, 1), 0.99),
                              torch.randint(256, (8, 3, 24, 24)).float()))
            """,
        ),
        says=(
            r"\bkind (no_gradient|grad_disabled)\b",
            r"parameters convnet\.0\.weight, convnet\.0\.bias, convnet\.2\.weight, convnet\.2\.bias\n",
            r"gradients are off|no_grad",
        ),
        fix=r"no_grad",
        fixed=(
            (
                "        with torch.no_grad():  # <- here\n            obs = self.aug_and_encode(obs)\n",
                "        obs = self.aug_and_encode(obs)\n        with torch.no_grad():\n",
            ),
        ),
        works="agent.encoder.convnet[0].weight.grad is not None",
    ),
    ReportCase(
        name="extractor-hook-detaches-the-image-tokens",
        source="https://github.com/lucidrains/CoCa-pytorch/issues/6",
        answer="The hook keeps output.clone().detach(), so the image encoder gets no gradient: detach only where it is asked for.",
        magic="autograd",
        cells=(
            """
            def apply_tuple_or_single(fn, val):
                if isinstance(val, tuple):
                    return tuple(map(fn, val))
                return fn(val)

            class ViT(nn.Module):
                def __init__(self, dim=32):
                    super().__init__()
                    self.to_patch_embedding = nn.Conv2d(3, dim, 8, 8)
                    self.transformer = nn.TransformerEncoder(nn.TransformerEncoderLayer(dim, 2, 64, 0.0, batch_first=True), 1)
                    self.mlp_head = nn.Linear(dim, 10)

                def forward(self, img):
                    x = self.to_patch_embedding(img).flatten(2).transpose(1, 2)
                    return self.mlp_head(self.transformer(x).mean(1))

            class Extractor(nn.Module):
                def __init__(self, vit, layer_name='transformer', return_embeddings_only=True):
                    super().__init__()
                    self.vit = vit
                    self.layer, self.latents = getattr(vit, layer_name), None
                    self.layer.register_forward_hook(self._hook)

                def _hook(self, _, inputs, output):
                    self.latents = apply_tuple_or_single(lambda t: t.clone().detach(), output)  # <- here

                def forward(self, img):
                    self.vit(img)
                    return self.latents

            class CoCa(nn.Module):
                def __init__(self, img_encoder, dim=32, num_tokens=50):
                    super().__init__()
                    self.img_encoder = img_encoder
                    self.token_emb = nn.Embedding(num_tokens, dim)
                    self.img_attn_pool = nn.MultiheadAttention(dim, 2, batch_first=True)
                    self.img_query = nn.Parameter(torch.randn(1, dim))
                    self.to_logits = nn.Linear(dim, num_tokens)

                def forward(self, text, images):
                    image_tokens = self.img_encoder(images)
                    query = self.img_query.expand(len(images), 1, -1)
                    image_embeds = self.img_attn_pool(query, image_tokens, image_tokens)[0]
                    text_tokens = self.token_emb(text[:, :-1]) + image_embeds
                    return F.cross_entropy(self.to_logits(text_tokens).flatten(0, 1), text[:, 1:].flatten())

            coca = CoCa(Extractor(ViT()))
            optimizer = torch.optim.Adam(coca.parameters(), lr=1e-4)
            """,
            """
            %%autograd -o r
            for _ in range(4):
                loss = coca(torch.randint(50, (4, 12)), torch.randn(4, 3, 32, 32))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            """,
        ),
        op=("detach",),
        says=(r"\bkind no_gradient\b", r"parameters img_encoder\.vit\.to_patch_embedding\.weight"),
        fix=r"lambda t: t\.clone\(\)",
        fixed=(("t.clone().detach()", "t.clone()"),),
        works="coca.img_encoder.vit.to_patch_embedding.weight.grad is not None",
    ),
    ReportCase(
        name="checkpointed-first-layers-get-no-gradient",
        source="https://github.com/pytorch/pytorch/issues/7617",
        answer="No input of the reentrant checkpoint requires a gradient, so its parameters get none: use_reentrant=False.",
        magic="autograd",
        cells=(
            """
            from torch.utils.checkpoint import checkpoint

            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.features = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
                    self.head = nn.Linear(3, 2)

                def forward(self, x):
                    z1 = checkpoint(lambda _: self.features(_), x, use_reentrant=True)  # <- here
                    return self.head(z1)

            m = Net()
            optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
            """,
            """
            %%autograd -o r
            for _ in range(4):
                x = torch.randn(10, 4)
                loss = F.cross_entropy(m(x), torch.randint(2, (10,)))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            """,
        ),
        says=(
            r"\bkind no_gradient\b",
            r"parameters features\.0\.weight, features\.0\.bias, features\.2\.weight, features\.2\.bias\n",
            "checkpoint",
        ),
        fix=r"use_reentrant=False|requires_grad_\(\)",
        fixed=(("use_reentrant=True", "use_reentrant=False"),),
        works="m.features[0].weight.grad is not None",
    ),
    ReportCase(
        name="answer-scores-pass-a-softmax-twice",
        source="https://github.com/bowang-lab/Transformer-GCN-QA/pull/32",
        answer="CrossEntropyLoss applies a softmax itself: the one at the output of the model is to go.",
        magic="autograd",
        cells=(
            """
            class TransformerGCNQA(nn.Module):
                def __init__(self, n_rgcn_size=64, candidates=8):
                    super().__init__()
                    self.encoder = nn.LSTM(32, 32, batch_first=True, bidirectional=True)
                    self.fc_rgcn = nn.Linear(64, n_rgcn_size)
                    self.fc_logits = nn.Linear(n_rgcn_size, candidates)
                    self.softmax = nn.Softmax(dim=1)

                def forward(self, query, graph, target=None):
                    x = self.encoder(query)[0][:, -1]
                    for _ in range(2):
                        x = torch.tanh(graph @ self.fc_rgcn(x)) + x
                    logits = self.softmax(self.fc_logits(x))  # <- here
                    if target is None:
                        return logits
                    return logits, nn.CrossEntropyLoss()(logits, target)  # <- saved

            model = TransformerGCNQA()
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            """,
            """
            %%autograd -o r
            for _ in range(4):
                optimizer.zero_grad()
                logits, loss = model(torch.randn(6, 10, 32), torch.rand(6, 6), torch.randint(8, (6,)))
                loss.backward()
                optimizer.step()
            """,
        ),
        op=("softmax", "_softmax"),
        module=("softmax",),
        says=(r"\bkind double_softmax\b", "cross_entropy|CrossEntropyLoss"),
        fix=r"`logits = self\.fc_logits\(x\)`",
        fixed=(("self.softmax(self.fc_logits(x))", "self.fc_logits(x)"),),
    ),
    ReportCase(
        name="attention-over-one-hot-labels-then-cross-entropy",
        source="https://github.com/gitabcworld/MatchingNetworks/issues/5",
        answer="The predictions are already a softmax, summed by class, and cross_entropy applies another one.",
        magic="autograd",
        cells=(
            """
            class DistanceNetwork(nn.Module):
                def forward(self, support_set, input_image):
                    similarities = []
                    for support_image in support_set:
                        sum_support = torch.sum(torch.pow(support_image, 2), 1)
                        support_manitude = sum_support.clamp(1e-10, float("inf")).rsqrt()
                        dot_product = input_image.unsqueeze(1).bmm(support_image.unsqueeze(2)).squeeze()
                        similarities.append(dot_product * support_manitude)
                    return torch.stack(similarities)

            class AttentionalClassify(nn.Module):
                def forward(self, similarities, support_set_y):
                    softmax = nn.Softmax(dim=1)
                    softmax_similarities = softmax(similarities)  # <- here
                    return softmax_similarities.unsqueeze(1).bmm(support_set_y).squeeze()  # <- here

            class MatchingNetwork(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.g = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
                    self.dn, self.classify = DistanceNetwork(), AttentionalClassify()

                def forward(self, support_images, support_labels_one_hot, target_image, target_label):
                    encoded = torch.stack([self.g(support_images[:, i]) for i in range(support_images.size(1))])
                    similarities = self.dn(encoded, self.g(target_image)).t()
                    preds = self.classify(similarities, support_labels_one_hot)
                    return F.cross_entropy(preds, target_label)

            matchNet = MatchingNetwork()
            optimizer = torch.optim.Adam(matchNet.parameters(), lr=1e-3)
            """,
            """
            %%autograd -o r
            for _ in range(4):
                one_hot = F.one_hot(torch.randint(5, (8, 5)), 5).float()
                loss = matchNet(torch.randn(8, 5, 1, 14, 14), one_hot, torch.randn(8, 1, 14, 14), torch.randint(5, (8,)))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            """,
        ),
        says=(r"\bkind double_softmax\b",),
        fix=r"softmax|log",
        fixed=(("F.cross_entropy(preds, target_label)", "F.nll_loss(preds.clamp_min(1e-8).log(), target_label)"),),
    ),
    ReportCase(
        name="a-loaded-model-takes-the-old-optimizer-parameters",
        source="https://github.com/kitzeslab/opensoundscape/issues/351",
        answer="optimizer_params of the saved model hold the old network's parameters: set them to those of the new one.",
        magic="autograd",
        cells=(
            """
            class PytorchModel:
                def __init__(self, classes):
                    self.classes = classes
                    self.network = nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
                                                 nn.Linear(128, len(classes)))
                    self.optimizer_cls = torch.optim.SGD
                    self.optimizer_params = {"params": list(self.network.parameters()), "lr": 0.01, "momentum": 0.9}
                    self.loss_fn = nn.BCEWithLogitsLoss()

                def _init_optimizer(self):
                    return self.optimizer_cls([self.optimizer_params])  # <- here

                def save(self):
                    return {"classes": self.classes, "state_dict": self.network.state_dict(), "optimizer_params": self.optimizer_params}

                @classmethod
                def from_checkpoint(cls, model_dict):
                    model = cls(model_dict["classes"])
                    model.network.load_state_dict(model_dict["state_dict"])
                    model.optimizer_params = model_dict["optimizer_params"]  # <- here
                    return model

                def train(self, batches):
                    self.opt_net = self._init_optimizer()  # <- here
                    self.network.train()
                    for x, y in batches:
                        loss = self.loss_fn(self.network(x), y)
                        self.opt_net.zero_grad()
                        loss.backward()
                        self.opt_net.step()

            batches = [(torch.randn(4, 1, 24, 24), torch.randint(2, (4, 3)).float()) for _ in range(4)]
            first = PytorchModel(["a", "b", "c"])
            first.train(batches)
            """,
            """
            %%autograd -o r
            model = PytorchModel.from_checkpoint(first.save())
            model.train(batches)
            """,
        ),
        says=(r"\bkind stale_optimizer\b", r"parameters 0\.weight, 0\.bias, 4\.weight, 4\.bias\n"),
        fix=r"parameters|again",
        fixed=(
            (
                'model.optimizer_params = model_dict["optimizer_params"]',
                'model.optimizer_params = {**model_dict["optimizer_params"], "params": list(model.network.parameters())}',
            ),
        ),
    ),
    ReportCase(
        name="every-micro-batch-clears-the-gradients",
        source="https://github.com/bytetriper/RAE/issues/67",
        answer="zero_grad() runs for each micro-batch, so only the last one counts: clear the gradients after the step.",
        magic="autograd",
        cells=(
            """
            class DiT(nn.Module):
                def __init__(self, dim=64, classes=10):
                    super().__init__()
                    self.y, self.net = nn.Embedding(classes, dim), nn.Sequential(nn.Linear(dim + 1, 128), nn.SiLU(), nn.Linear(128, dim))

                def forward(self, x, t, y):
                    return self.net(torch.cat([x + self.y(y), t[:, None]], 1))

            model = DiT()
            ema = DiT().requires_grad_(False)
            optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
            grad_accum_steps = 4
            loader = DataLoader(TensorDataset(torch.randn(128, 64), torch.randint(10, (128,))), batch_size=8)
            """,
            """
            %%autograd -o r
            for step, (x, y) in enumerate(loader):
                optimizer.zero_grad(set_to_none=True)  # <- here
                noise, t = torch.randn_like(x), torch.rand(len(x))
                xt = (1 - t[:, None]) * x + t[:, None] * noise
                loss = F.mse_loss(model(xt, t, y), noise - x) / grad_accum_steps
                loss.backward()
                if (step + 1) % grad_accum_steps == 0:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    with torch.no_grad():
                        for e, p in zip(ema.parameters(), model.parameters()):
                            e.lerp_(p, 0.001)
            """,
        ),
        says=(r"\bkind zeroed_before_step\b",),
        fix=r"zero_grad",
        fixed=(
            ("    optimizer.zero_grad(set_to_none=True)  # <- here\n", ""),
            ("        optimizer.step()\n", "        optimizer.step()\n        optimizer.zero_grad(set_to_none=True)\n"),
        ),
    ),
    ReportCase(
        name="reinforce-copies-its-log-probabilities",
        source="https://github.com/kengz/SLM-Lab/pull/133",
        answer="torch.tensor makes a new tensor without the graph, so the net gets no gradient: torch.stack.",
        magic="autograd",
        cells=(
            """
            class Reinforce:
                def __init__(self, state_dim=4, action_dim=2):
                    self.net = nn.Sequential(nn.Linear(state_dim, 64), nn.ReLU(), nn.Linear(64, action_dim))
                    self.optim = torch.optim.Adam(self.net.parameters(), lr=0.002)
                    self.saved_log_probs = []

                def act(self, state):
                    action_pd = torch.distributions.Categorical(logits=self.net(state))
                    action = action_pd.sample()
                    self.saved_log_probs.append(action_pd.log_prob(action))
                    return action.item()

                def calc_policy_loss(self, rewards, gamma=0.99):
                    rets, R = torch.zeros(len(rewards)), 0.0
                    for i in reversed(range(len(rewards))):
                        rets[i] = R = rewards[i] + gamma * R
                    advs = (rets - rets.mean()) / (rets.std() + 1e-8)
                    log_probs = torch.tensor(self.saved_log_probs, requires_grad=True)  # <- here
                    return -(log_probs * advs).sum()

                def train(self, rewards):
                    loss = self.calc_policy_loss(rewards)
                    self.optim.zero_grad()
                    loss.backward()
                    self.optim.step()
                    self.saved_log_probs.clear()
            """,
            """
            %%autograd -o r
            agent = Reinforce()
            for episode in range(4):
                rewards = []
                for t in range(10):
                    rewards.append(float(agent.act(torch.randn(4)) == 0))
                agent.train(rewards)
            """,
        ),
        says=(r"\bkind no_gradient\b", r"parameters 0\.weight, 0\.bias, 2\.weight, 2\.bias\n", r"new tensor"),
        fix=r"torch\.stack\(self\.saved_log_probs\)",
        fixed=(("torch.tensor(self.saved_log_probs, requires_grad=True)", "torch.stack(self.saved_log_probs)"),),
        works="agent.net[0].weight.grad is not None",
    ),
    ReportCase(
        name="a-misspelt-freeze-of-vgg",
        source="https://github.com/udacity/deep-learning-v2-pytorch/issues/12",
        answer="require_grad lacks an s and freezes nothing; the optimizer holds the classifier alone, so what is trained is as meant.",
        magic="autograd",
        healthy=True,
        cells=(
            """
            class VGG(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
                                                  nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(4))
                    self.classifier = nn.Sequential(nn.Linear(256, 64), nn.ReLU(True), nn.Dropout(), nn.Linear(64, 1000))

                def forward(self, x):
                    return self.classifier(torch.flatten(self.features(x), 1))

            vgg16 = VGG()
            # Freeze training for all "features" layers
            for param in vgg16.features.parameters():
                param.require_grad = False
            n_inputs = vgg16.classifier[3].in_features
            vgg16.classifier[3] = nn.Linear(n_inputs, 5)
            criterion = nn.CrossEntropyLoss()
            optimizer = torch.optim.SGD(vgg16.classifier.parameters(), lr=0.001)
            """,
            """
            %%autograd -o r
            for epoch in range(2):
                for batch_i in range(3):
                    data, target = torch.randn(4, 3, 32, 32), torch.randint(5, (4,))
                    optimizer.zero_grad()
                    output = vgg16(data)
                    loss = criterion(output, target)
                    loss.backward()
                    optimizer.step()
            """,
        ),
    ),
    ReportCase(
        name="zero-grad-between-loss-and-backward",
        source="https://github.com/rll/deepul/issues/12",
        answer="zero_grad() after the loss and before backward() is as good as before the forward pass.",
        magic="autograd",
        healthy=True,
        cells=(
            """
            class MADE(nn.Module):
                def __init__(self, d=6, k=10):
                    super().__init__()
                    self.d, self.k = d, k
                    self.net = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Linear(64, 3 * d * k))
                    self.base_dist = torch.distributions.Normal(torch.zeros(d), torch.ones(d))

                def flow(self, x):
                    weights, mu, log_s = self.net(x * 0.1).view(-1, self.d, self.k, 3).unbind(-1)
                    dist = torch.distributions.Normal(mu, log_s.exp())
                    weights = weights.softmax(-1)
                    z = (dist.cdf(x.unsqueeze(-1)) * weights).sum(-1)
                    return z, (dist.log_prob(x.unsqueeze(-1)).exp() * weights).sum(-1).clamp_min(1e-6).log()

                def nll(self, x):
                    z, log_det = self.flow(x)
                    return -(self.base_dist.log_prob(z) + log_det).mean()

            model = MADE()
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            train_loader = DataLoader(torch.randn(64, 6), batch_size=16)
            """,
            """
            %%autograd -o r
            model.train()
            for epoch in range(2):
                for x in train_loader:
                    x = x.float()
                    loss = model.nll(x)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            """,
        ),
    ),
    ReportCase(
        name="gan-tutorial-without-detach",
        source="https://github.com/yunjey/pytorch-tutorial/issues/56",
        answer="Without detach() the generator gets gradients that reset_grad() clears again before its own step: slower, not wrong.",
        magic="autograd",
        healthy=True,
        cells=(
            """
            latent_size, hidden_size, image_size, batch_size = 16, 64, 196, 32
            D = nn.Sequential(nn.Linear(image_size, hidden_size), nn.LeakyReLU(0.2), nn.Linear(hidden_size, 1), nn.Sigmoid())
            G = nn.Sequential(nn.Linear(latent_size, hidden_size), nn.ReLU(), nn.Linear(hidden_size, image_size), nn.Tanh())
            criterion = nn.BCELoss()
            d_optimizer = torch.optim.Adam(D.parameters(), lr=0.0002)
            g_optimizer = torch.optim.Adam(G.parameters(), lr=0.0002)

            def reset_grad():
                d_optimizer.zero_grad()
                g_optimizer.zero_grad()
            """,
            """
            %%autograd -o r
            for i in range(6):
                images = torch.rand(batch_size, image_size) * 2 - 1
                real_labels, fake_labels = torch.ones(batch_size, 1), torch.zeros(batch_size, 1)
                outputs = D(images)
                d_loss_real = criterion(outputs, real_labels)
                z = torch.randn(batch_size, latent_size)
                fake_images = G(z)
                outputs = D(fake_images)
                d_loss_fake = criterion(outputs, fake_labels)
                d_loss = d_loss_real + d_loss_fake
                reset_grad()
                d_loss.backward()
                d_optimizer.step()

                z = torch.randn(batch_size, latent_size)
                fake_images = G(z)
                outputs = D(fake_images)
                g_loss = criterion(outputs, real_labels)
                reset_grad()
                g_loss.backward()
                g_optimizer.step()
            """,
        ),
    ),
    ReportCase(
        name="online-classifier-on-detached-features",
        source="https://github.com/vturrisi/solo-learn/issues/135",
        answer="Only the online classifier reads the detached features; the encoder learns from its own loss.",
        magic="autograd",
        healthy=True,
        cells=(
            """
            class BaseMethod(nn.Module):
                def __init__(self, num_classes=10):
                    super().__init__()
                    self.encoder = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(),
                                                 nn.AdaptiveAvgPool2d(2), nn.Flatten())
                    self.classifier = nn.Linear(64, num_classes)
                    self.projector = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))

                def forward(self, X):
                    feats = self.encoder(X)
                    logits = self.classifier(feats.detach())
                    return {"logits": logits, "feats": feats, "z": self.projector(feats)}

                def training_step(self, X1, X2, targets):
                    outs = [self(X1), self(X2)]
                    class_loss = sum(F.cross_entropy(out["logits"], targets) for out in outs) / 2
                    z1, z2 = (F.normalize(out["z"], dim=-1) for out in outs)
                    sim = z1 @ z2.t() / 0.2
                    return F.cross_entropy(sim, torch.arange(len(sim))) + class_loss

            model = BaseMethod()
            optimizer = torch.optim.SGD([{"params": model.encoder.parameters()}, {"params": model.projector.parameters()},
                                         {"params": model.classifier.parameters(), "lr": 0.1}], lr=0.3)
            """,
            """
            %%autograd -o r
            for _ in range(4):
                X = torch.randn(16, 3, 24, 24)
                loss = model.training_step(X + 0.1 * torch.randn_like(X), X.flip(-1), torch.randint(10, (16,)))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            """,
        ),
    ),
    ReportCase(
        name="log-softmax-twice-changes-nothing",
        source="https://github.com/speedinghzl/Pytorch-Deeplab/issues/2",
        answer="log_softmax before cross_entropy is redundant, and of no effect: its exponentials sum to one already.",
        magic="autograd",
        healthy=True,
        cells=(
            """
            net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(16, 5, 1))
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)

            class CrossEntropy2d(nn.Module):
                def forward(self, predict, target):
                    n, c, h, w = predict.size()
                    target_mask = (target >= 0) * (target != 255)
                    target = target[target_mask]
                    predict = predict.transpose(1, 2).transpose(2, 3).contiguous()
                    predict = predict[target_mask.view(n, h, w, 1).repeat(1, 1, 1, c)].view(-1, c)
                    return F.cross_entropy(predict, target)

            def loss_calc(pred, label):
                criterion = CrossEntropy2d()
                m = nn.LogSoftmax(dim=1)
                pred = m(pred)
                return criterion(pred, label)
            """,
            """
            %%autograd -o r
            for i_iter in range(4):
                optimizer.zero_grad()
                labels = torch.randint(5, (2, 16, 16))
                labels[:, :2] = 255
                loss = loss_calc(net(torch.randn(2, 3, 16, 16)), labels)
                loss.backward()
                optimizer.step()
            """,
        ),
    ),
)
