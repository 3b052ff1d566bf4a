"""Losses that became NaN: what people asked, and what it was."""

from __future__ import annotations

from tests.reports.case import ReportCase

CASES: tuple[ReportCase, ...] = (
    ReportCase(
        name="rmse_of_a_perfect_prediction",
        source="https://discuss.pytorch.org/t/function-mselossbackward-returned-nan-values-in-its-0th-output/94875",
        answer="The square root has no finite derivative at 0, where the prediction is exact: add a small eps inside it.",
        magic="nanhunt",
        cells=(
            """
            class Regressor(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.fc1 = nn.Linear(20, 64)
                    self.fc2 = nn.Linear(64, 1)

                def forward(self, x):
                    return self.fc2(F.relu(self.fc1(x)))

            model = Regressor()
            criterion = nn.MSELoss()
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            data = [(torch.rand(32, 20), torch.rand(32, 1) + 0.5) for _ in range(6)]
            data[3] = (torch.zeros(1, 20), None)
            """,
            """
            %%nanhunt -o r
            for inputs, targets in data:
                optimizer.zero_grad()
                outputs = model(inputs)
                if targets is None:  # the teacher's own answer
                    targets = outputs.detach()
                loss = torch.sqrt(criterion(outputs, targets))  # <- here
                loss.backward()
                optimizer.step()
                print(loss.item())
            """,
        ),
        op=("sqrt",),
        module=(None,),
        says=(r"0",),
        fix=r"sqrt\(criterion\(outputs, targets\)(\.clamp\(min=| *\+)|eps",
        fixed=(("torch.sqrt(criterion(outputs, targets))", "torch.sqrt(criterion(outputs, targets) + 1e-6)"),),
        works="math.isfinite(loss.item())",
    ),
    ReportCase(
        name="fourth_root_of_the_output",
        source="https://e-com-net.com/article/1610541398946250752.htm",
        answer="The derivative of out ** (1/4) is infinite where out is 0.",
        magic="nanhunt",
        cells=(
            """
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.fc1 = nn.Linear(8, 32)
                    self.fc2 = nn.Linear(32, 1)
                    self.scale = nn.Parameter(torch.ones(1))

                def forward(self, x):
                    return self.scale * F.relu(self.fc2(torch.tanh(self.fc1(x))))

            model = Net()
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            batches = [(torch.randn(64, 8), torch.rand(64, 1)) for _ in range(10)]
            """,
            """
            %%nanhunt -o r
            for input, y in batches:
                optimizer.zero_grad()
                out  = model(input)
                pred = out ** (1/4)  # <- here
                loss = 2*nn.MSELoss()(pred ,y)+0.1*nn.L1Loss()(pred ,y)

                loss.backward()
                optimizer.step()
            """,
        ),
        op=("pow",),
        module=(None,),
        fix=r"\*\* *\(1/4\).*|out.*(clamp|\+ *1e|eps)",
        never=(r"learning rate",),
        fixed=(("out ** (1/4)", "out.clamp(min=1e-6) ** (1/4)"),),
        works="math.isfinite(loss.item())",
    ),
    ReportCase(
        name="angular_layer_with_acos",
        source="https://discuss.pytorch.org/t/nan-gradient-for-torch-cos-torch-acos/9617",
        answer="The derivative of acos is infinite at 1 and -1, and clamp(-1, 1) lets them through: use 2 cos^2 - 1, or clamp further in.",
        magic="nanhunt",
        cells=(
            """
            class AngleLinear(nn.Module):
                def __init__(self, in_features, out_features):
                    super().__init__()
                    self.weight = nn.Parameter(torch.randn(in_features, out_features))

                def forward(self, x):
                    w = self.weight
                    xlen = x.pow(2).sum(1).pow(0.5).view(-1, 1)  # ||x||
                    wlen = w.pow(2).sum(0).pow(0.5).view(1, -1)  # ||w||
                    cos_theta = (x.mm(w) / xlen / wlen).clamp(-1, 1)
                    theta = cos_theta.acos()  # <- here
                    cos_2_theta = torch.cos(2*theta)
                    return cos_2_theta * xlen.view(-1, 1)

            features = torch.randn(64, 2)
            labels = torch.randint(0, 64, (64,))
            layer = AngleLinear(2, 64)
            with torch.no_grad():
                layer.weight.copy_(features.t())  # one centre a sample, to begin with
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
            """,
            """
            %%nanhunt -o r
            for epoch in range(20):
                optimizer.zero_grad()
                loss = F.cross_entropy(layer(features), labels)
                loss.backward()
                optimizer.step()
            """,
        ),
        op=("acos",),
        module=("", None),
        fix=r"clamp\(.*(1e-|0\.9)|cos_theta \*\* 2|1 ?- ?(1e-|eps)",
        fixed=((".clamp(-1, 1)", ".clamp(-1 + 1e-6, 1 - 1e-6)"),),
        works="math.isfinite(loss.item())",
    ),
    ReportCase(
        name="gradient_magnitude_of_a_flat_image",
        source="https://openillumi.com/en/en-fix-pytorch-cpu-nan-powbackward0",
        answer="sqrt of the squared gradients is taken at 0 wherever the image is flat: add eps inside the root.",
        magic="nanhunt",
        cells=(
            """
            class GradientLoss(nn.Module):
                def __init__(self, device="cpu"):
                    super().__init__()
                    self.kx = torch.tensor([[-1., 0., 1.], [-2., 0., 2.], [-1., 0., 1.]], device=device).view(1, 1, 3, 3)
                    self.ky = self.kx.transpose(2, 3).contiguous()

                def forward(self, image):
                    self.grad_x = F.conv2d(image, self.kx)
                    self.grad_y = F.conv2d(image, self.ky)
                    self.grad_x2 = torch.pow(self.grad_x, 2)
                    self.grad_y2 = torch.pow(self.grad_y, 2)
                    self.grad_mag = torch.sqrt(self.grad_x2 + self.grad_y2)  # <- here
                    return self.grad_mag.mean()

            image = torch.zeros(1, 1, 32, 32)
            image[:, :, 8:24, 8:24] = 1.
            image.requires_grad_()
            target = torch.rand(1, 1, 32, 32)
            grad_loss = GradientLoss()
            optimizer = torch.optim.Adam([image], lr=0.01)
            """,
            """
            %%nanhunt -o r
            for i in range(30):
                optimizer.zero_grad()
                loss = F.mse_loss(image, target) + 0.1 * grad_loss(image)
                loss.backward()
                optimizer.step()
            """,
        ),
        op=("sqrt",),
        module=("", None),
        fix=r"sqrt\(.*(clamp|1e-|eps)",
        fixed=(("torch.sqrt(self.grad_x2 + self.grad_y2)", "torch.sqrt((self.grad_x2 + self.grad_y2).clamp(min=1e-8))"),),
        works="math.isfinite(loss.item()) and bool(torch.isfinite(image).all())",
    ),
    ReportCase(
        name="exponential_of_the_cross_entropy",
        source="https://whosebug.com/question/6301115/Weird-behaviour-of-loss-function-in-pytorch",
        answer="exp of an unbounded cross entropy overflows as soon as one confident prediction is wrong.",
        magic="nanhunt",
        cells=(
            """
            class ClientModel(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.fc1 = nn.Linear(784, 200)
                    self.fc2 = nn.Linear(200, 10)

                def forward(self, x):
                    return self.fc2(F.relu(self.fc1(x.view(x.size(0), -1))))

            images = torch.randint(0, 256, (1280, 1, 28, 28)).float()  # as they come, 0 to 255
            labels = torch.randint(0, 10, (1280,))
            train_loader = DataLoader(TensorDataset(images, labels), batch_size=64)
            client_model = ClientModel()
            optimizer = torch.optim.SGD(client_model.parameters(), lr=0.01)
            """,
            """
            %%nanhunt -o r
            e_loss = []
            eta = 2 #just an example of value of eta I'm using
            epoch = 1
            criterion = nn.CrossEntropyLoss()
            for e in range(epoch):
                train_loss = 0
                for batch_idx, (data, target) in enumerate(train_loader):
                    client_model.train()
                    optimizer.zero_grad()
                    output = client_model(data)
                    loss = torch.exp(criterion(output, target)/eta)  # <- here
                    loss.backward()
                    optimizer.step()
                    train_loss += loss.item()*data.size(0)
                train_loss = train_loss/len(train_loader) # average losses
                e_loss.append(train_loss)
            """,
        ),
        op=("exp",),
        module=(None,),
        fix=r"clamp|learning rate|normali[sz]e|scale",
        fixed=(("torch.exp(criterion(output, target)/eta)", "torch.exp((criterion(output, target)/eta).clamp(max=10))"),),
        works="math.isfinite(loss.item()) and all(bool(torch.isfinite(p).all()) for p in client_model.parameters())",
    ),
    ReportCase(
        name="supcon_class_with_a_single_sample",
        source="https://github.com/HobbitLong/SupContrast/pull/142",
        answer="A sample without another of its class has no positive pair: mask.sum(1) is 0, and 0 / 0 is NaN; set such counts to 1.",
        magic="nanhunt",
        cells=(
            """
            class SupConLoss(nn.Module):
                def __init__(self, temperature=0.07, base_temperature=0.07):
                    super().__init__()
                    self.temperature = temperature
                    self.base_temperature = base_temperature

                def forward(self, features, labels):
                    batch_size = features.shape[0]
                    labels = labels.contiguous().view(-1, 1)
                    mask = torch.eq(labels, labels.T).float()
                    contrast_count = features.shape[1]
                    contrast_feature = torch.cat(torch.unbind(features, dim=1), dim=0)
                    anchor_dot_contrast = torch.div(torch.matmul(contrast_feature, contrast_feature.T), self.temperature)
                    logits_max, _ = torch.max(anchor_dot_contrast, dim=1, keepdim=True)
                    logits = anchor_dot_contrast - logits_max.detach()

                    mask = mask.repeat(contrast_count, contrast_count)
                    logits_mask = torch.scatter(torch.ones_like(mask), 1, torch.arange(batch_size * contrast_count).view(-1, 1), 0)
                    mask = mask * logits_mask

                    exp_logits = torch.exp(logits) * logits_mask
                    log_prob = logits - torch.log(exp_logits.sum(1, keepdim=True))
                    mean_log_prob_pos = (mask * log_prob).sum(1) / mask.sum(1)  # <- here

                    loss = - (self.temperature / self.base_temperature) * mean_log_prob_pos
                    return loss.view(contrast_count, batch_size).mean()
            """,
            """
            %%nanhunt -o r
            temp = 0.8
            criterion = SupConLoss(temperature=temp)

            # features: [bsz, n_views, f_dim]
            features = torch.randn(4,1,3)
            features = F.normalize(features, p=2, dim=1)
            # labels: [bsz]
            labels = torch.tensor([0,1,1,3], dtype=float)

            loss = criterion(features, labels)
            print(loss)
            """,
        ),
        op=("div",),
        module=(None, ""),
        fix=r"mask\.sum\(1\)\.?.*(clamp|where|\+|1)",
        fixed=(("/ mask.sum(1)", "/ mask.sum(1).clamp(min=1)"),),
        works="math.isfinite(loss.item())",
    ),
    ReportCase(
        name="supcon_features_that_nobody_normalized",
        source="https://github.com/HobbitLong/SupContrast/issues/104",
        answer="Without normalized features every exp but the own one underflows to log(0): add 1e-6 inside the log, or normalize.",
        magic="nanhunt",
        cells=(
            """
            class SupConLoss(nn.Module):
                def __init__(self, temperature=0.07):
                    super().__init__()
                    self.temperature = temperature

                def forward(self, features, labels):
                    labels = labels.view(-1, 1)
                    mask = torch.eq(labels, labels.T).float()
                    anchor_dot_contrast = torch.div(torch.matmul(features, features.T), self.temperature)
                    logits_max, _ = torch.max(anchor_dot_contrast, dim=1, keepdim=True)
                    logits = anchor_dot_contrast - logits_max.detach()
                    logits_mask = 1 - torch.eye(features.shape[0])
                    mask = mask * logits_mask
                    exp_logits = torch.exp(logits) * logits_mask
                    log_prob = logits - torch.log(exp_logits.sum(1, keepdim=True))  # <- here
                    mean_log_prob_pos = (mask * log_prob).sum(1) / mask.sum(1)
                    return -mean_log_prob_pos.mean()

            class ResNet12(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.conv1 = nn.Conv2d(3, 32, 3, stride=2, padding=1)
                    self.bn1 = nn.BatchNorm2d(32)
                    self.conv2 = nn.Conv2d(32, 64, 3, stride=2, padding=1)
                    self.bn2 = nn.BatchNorm2d(64)

                def forward(self, x):
                    x = F.relu(self.bn1(self.conv1(x)))
                    return F.relu(self.bn2(self.conv2(x))).flatten(1)

            encoder = ResNet12()
            criterion = SupConLoss(temperature=0.07)
            optimizer = torch.optim.SGD(encoder.parameters(), lr=0.05, momentum=0.9)
            images = torch.randn(16, 3, 32, 32)
            labels = torch.arange(16) % 4
            """,
            """
            %%nanhunt -o r
            for step in range(10):
                features = encoder(images)
                loss = criterion(features, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            """,
        ),
        op=("log",),
        module=(None, ""),
        fix=r"1e-|clamp|eps|normalize|logsumexp",
        fixed=(("torch.log(exp_logits.sum(1, keepdim=True))", "torch.log(exp_logits.sum(1, keepdim=True).clamp(min=1e-6))"),),
        works="math.isfinite(loss.item())",
    ),
    ReportCase(
        name="focal_loss_whose_eps_is_lost_in_float32",
        source="https://github.com/NVIDIA/apex/issues/358",
        answer="1 - 1e-8 is 1 in float32, so clamp(eps, 1 - eps) lets a 1 through, and 0 * log(0) is NaN: add eps inside the log.",
        magic="nanhunt",
        cells=(
            """
            class FocalLoss(nn.Module):
                def __init__(self, gamma=0.):
                    super().__init__()
                    self.gamma = gamma

                def forward(self, y_pred, y_true):
                    eps = 1e-8
                    y_pred = torch.clamp(y_pred, eps, 1-eps)
                    y_true = y_true.unsqueeze(1)
                    y_pred = y_pred.unsqueeze(1)
                    loss = torch.sum(y_true*torch.pow(1-y_pred,self.gamma)*torch.log(y_pred) +
                                     (1-y_true)*torch.pow(y_pred,self.gamma)*torch.log(1-y_pred),dim=1)  # <- here
                    loss = -1.0 * loss.sum() / y_pred.size(0)
                    return loss

            model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1), nn.Sigmoid())
            inputs = 300 * torch.randn(32, 10)
            y_true = torch.randint(0, 2, (32,)).float()
            criterion = FocalLoss()
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            """,
            """
            %%nanhunt -o r
            for i in range(10):
                y_pred = model(inputs).squeeze(1)
                loss = criterion(y_pred, y_true)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            """,
        ),
        op=("log",),
        module=(None, ""),
        fix=r"1 ?- ?y_pred\)?.*(clamp|1e-|eps)|with_logits|1e-[67]",
        fixed=(("torch.log(1-y_pred)", "torch.log((1-y_pred).clamp(min=1e-6))"),),
        works="math.isfinite(loss.item())",
    ),
    ReportCase(
        name="keypoint_scores_divided_by_the_largest_channel",
        source="https://github.com/mihaidusmanu/d2-net/issues/78",
        answer="Where every channel is 0 after the ReLU, the depth-wise maximum is 0: add 1e-8 to the divisor.",
        magic="nanhunt",
        cells=(
            """
            class SoftDetectionModule(nn.Module):
                def __init__(self, soft_local_max_size=3):
                    super().__init__()
                    self.soft_local_max_size = soft_local_max_size
                    self.pad = self.soft_local_max_size // 2

                def forward(self, batch):
                    b = batch.size(0)
                    batch = F.relu(batch)

                    max_per_sample = torch.max(batch.view(b, -1), dim=1)[0]
                    exp = torch.exp(batch / max_per_sample.view(b, 1, 1, 1))
                    sum_exp = (
                        self.soft_local_max_size ** 2 *
                        F.avg_pool2d(F.pad(exp, [self.pad] * 4, mode='constant', value=1.), self.soft_local_max_size, stride=1)
                    )
                    local_max_score = exp / sum_exp

                    depth_wise_max = torch.max(batch, dim=1)[0]
                    depth_wise_max_score = batch / depth_wise_max.unsqueeze(1)  # <- here

                    all_scores = local_max_score * depth_wise_max_score
                    score = torch.max(all_scores, dim=1)[0]
                    score = score / torch.sum(score.view(b, -1), dim=1).view(b, 1, 1)
                    return score

            class D2Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.dense_feature_extraction = nn.Sequential(
                        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1, bias=False)
                    )
                    self.detection = SoftDetectionModule()

                def forward(self, batch):
                    dense_features = self.dense_feature_extraction(batch['image1'])
                    return {'dense_features1': F.normalize(dense_features, dim=1), 'scores1': self.detection(dense_features)}

            model = D2Net()
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            image = torch.rand(2, 3, 32, 32)
            image[1, :, :, 16:] = 0  # the black border of a warped photograph
            batch = {'image1': image}
            target = torch.rand(2, 16, 16)
            """,
            """
            %%nanhunt -o r
            for i in range(5):
                optimizer.zero_grad()
                output = model(batch)
                loss = ((output['scores1'] - target) ** 2).mean()
                loss.backward()
                optimizer.step()
            """,
        ),
        op=("div",),
        module=("detection",),
        fix=r"depth_wise_max\.unsqueeze\(1\).*(1e-|clamp|eps)",
        fixed=(("batch / depth_wise_max.unsqueeze(1)", "batch / depth_wise_max.unsqueeze(1).clamp(min=1e-8)"),),
        works="math.isfinite(loss.item())",
    ),
    ReportCase(
        name="causal_mask_filled_with_minus_minus_infinity",
        source="https://github.com/lucidrains/memory-compressed-attention/issues/2",
        answer="-float('-inf') is +inf: softmax of it is NaN; the mask must be filled with -inf.",
        magic="nanhunt",
        cells=(
            """
            class MemoryCompressedAttention(nn.Module):
                def __init__(self, dim, heads=8, causal=True, compression_factor=3):
                    super().__init__()
                    self.heads = heads
                    self.causal = causal
                    self.compression_factor = compression_factor
                    self.compress_fn = nn.Conv1d(dim, dim, compression_factor, stride=compression_factor, groups=heads)
                    self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
                    self.to_out = nn.Linear(dim, dim)
                    self.null_k = nn.Parameter(torch.zeros(1, 1, dim))
                    self.null_v = nn.Parameter(torch.zeros(1, 1, dim))

                def forward(self, x):
                    b, t, d, h, cf = *x.shape, self.heads, self.compression_factor
                    q, k, v = self.to_qkv(x).chunk(3, dim=-1)
                    k, v = (self.compress_fn(kv.transpose(1, 2)).transpose(1, 2) for kv in (k, v))
                    k = torch.cat((self.null_k.expand(b, -1, -1), k), dim=1)
                    v = torch.cat((self.null_v.expand(b, -1, -1), v), dim=1)
                    q, k, v = (m.reshape(b, -1, h, d // h).transpose(1, 2) for m in (q, k, v))
                    dots = torch.einsum('bhid,bhjd->bhij', q, k) * d ** -0.5

                    if self.causal:
                        mask_q = mask_k = torch.arange(t)
                        mask_k = F.pad(mask_k.view(-1, cf).max(dim=-1).values, (1, 0), value=-1)
                        mask = mask_q[:, None] < mask_k[None, :]
                        dots.masked_fill_(mask, -float('-inf'))  # <- here

                    attn = dots.softmax(dim=-1)
                    out = torch.einsum('bhij,bhjd->bhid', attn, v)
                    return self.to_out(out.transpose(1, 2).reshape(b, t, d))

            attn = MemoryCompressedAttention(dim=64, heads=8)
            optimizer = torch.optim.Adam(attn.parameters(), lr=3e-4)
            x = torch.randn(2, 48, 64)
            """,
            """
            %%nanhunt -o r
            for _ in range(3):
                loss = (attn(x) - x).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            """,
        ),
        op=("masked_fill_", "masked_fill", "_softmax", "softmax"),
        module=("",),
        fix=r"(?<!-)float\('-inf'\)|-float\('inf'\)|finfo|-torch\.inf|-inf",
        fixed=(("-float('-inf')", "float('-inf')"),),
        works="math.isfinite(loss.item())",
    ),
    ReportCase(
        name="advantage_of_an_episode_end_of_one_step",
        source="https://github.com/quantumiracle/Popular-RL-Algorithms/issues/45",
        answer="The standard deviation of a single advantage is NaN: do not normalize a batch of one sample.",
        magic="nanhunt",
        cells=(
            """
            from torch.distributions import Categorical

            #Hyperparameters
            learning_rate = 0.0005
            gamma         = 0.98
            lmbda         = 0.95
            eps_clip      = 0.1
            K_epoch       = 3
            T_horizon     = 20

            class PPO(nn.Module):
                def __init__(self, state_dim, action_dim):
                    super(PPO, self).__init__()
                    self.data = []
                    self.fc1   = nn.Linear(state_dim,256)
                    self.fc_pi = nn.Linear(256,action_dim)
                    self.fc_v  = nn.Linear(256,1)
                    self.optimizer = torch.optim.Adam(self.parameters(), lr=learning_rate)

                def pi(self, x, softmax_dim = 0):
                    x = F.relu(self.fc1(x))
                    return F.softmax(self.fc_pi(x), dim=softmax_dim)

                def v(self, x):
                    x = F.relu(self.fc1(x))
                    return self.fc_v(x)

                def put_data(self, transition):
                    self.data.append(transition)

                def make_batch(self):
                    s, a, r, s_prime, prob_a, done = zip(*self.data)
                    self.data = []
                    column = lambda values: torch.tensor(values, dtype=torch.float).view(-1, 1)
                    return (torch.stack(s), torch.tensor(a).view(-1, 1), column(r), torch.stack(s_prime),
                            1 - column(done), column(prob_a))

                def train_net(self):
                    s, a, r, s_prime, done_mask, prob_a = self.make_batch()

                    for i in range(K_epoch):
                        td_target = r + gamma * self.v(s_prime) * done_mask
                        delta = td_target - self.v(s)
                        delta = delta.detach().numpy()

                        advantage_lst = []
                        advantage = 0.0
                        for delta_t in delta[::-1]:
                            advantage = gamma * lmbda * advantage + delta_t[0]
                            advantage_lst.append([advantage])
                        advantage_lst.reverse()
                        advantage = torch.tensor(advantage_lst, dtype=torch.float)
                        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-5)  # <- here

                        pi = self.pi(s, softmax_dim=1)
                        pi_a = pi.gather(1,a)
                        ratio = torch.exp(torch.log(pi_a) - torch.log(prob_a))  # a/b == exp(log(a)-log(b))

                        surr1 = ratio * advantage
                        surr2 = torch.clamp(ratio, 1-eps_clip, 1+eps_clip) * advantage
                        loss = -torch.min(surr1, surr2) + F.smooth_l1_loss(self.v(s) , td_target.detach())

                        self.optimizer.zero_grad()
                        loss.mean().backward()
                        self.optimizer.step()
                    return loss.mean().item()

            class CartPole:
                def reset(self):
                    self.t = 0
                    return torch.randn(4)

                def step(self, a):
                    self.t += 1
                    return torch.randn(4), 1.0, self.t == 41, {}
            """,
            """
            %%nanhunt -o r
            env = CartPole()
            model = PPO(4, 2)
            for n_epi in range(2):
                s = env.reset()
                done = False
                while not done:
                    for t in range(T_horizon):
                        prob = model.pi(s)
                        m = Categorical(prob)
                        a = m.sample().item()
                        s_prime, r_, done, info = env.step(a)
                        model.put_data((s, a, r_/100.0, s_prime, prob[a].item(), done))
                        s = s_prime
                        if done:
                            break

                    last = model.train_net()
            """,
        ),
        op=("std", "std_mean", "var"),
        module=(None,),
        fix=r"unbiased=False|correction=0|numel\(\)|len\(|shape\[0\]|size\(0\)",
        fixed=(("advantage.std()", "advantage.std(correction=0)"),),
        works="math.isfinite(last)",
    ),
    ReportCase(
        name="captcha_with_fewer_frames_than_ctc_needs",
        source="https://github.com/ypwhs/captcha_break/issues/29",
        answer="The model gives 6 frames for labels of 6 characters: with a repeated character CTC needs more, and the loss is infinite.",
        magic="nanhunt",
        cells=(
            """
            n_classes, n_len, n_input_length = 37, 6, 6
            width, height = 96, 34

            class CaptchaDataset(Dataset):
                def __init__(self, length):
                    self.length = length

                def __len__(self):
                    return self.length

                def __getitem__(self, index):
                    target = torch.randint(1, n_classes, (n_len,))
                    if index % 16 == 5:
                        target[3] = target[2]  # such as "ab77cd"
                    image = torch.rand(3, height, width)
                    return image, target, torch.full((1,), n_input_length), torch.full((1,), n_len)

            class Model(nn.Module):
                def __init__(self, n_classes):
                    super().__init__()
                    self.cnn = nn.Sequential(
                        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(True), nn.MaxPool2d((2, 4)),
                        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(True), nn.AdaptiveAvgPool2d((1, n_input_length)),
                    )
                    self.lstm = nn.LSTM(input_size=32, hidden_size=64, num_layers=2, bidirectional=True)
                    self.fc = nn.Linear(in_features=128, out_features=n_classes)

                def forward(self, x):
                    x = self.cnn(x)
                    x = x.reshape(x.shape[0], -1, x.shape[-1])
                    x = x.permute(2, 0, 1)
                    x, _ = self.lstm(x)
                    return self.fc(x)

            model = Model(n_classes)
            optimizer = torch.optim.Adam(model.parameters(), 1e-3)
            train_loader = DataLoader(CaptchaDataset(64), batch_size=16)
            """,
            """
            %%nanhunt -o r
            model.train()
            for batch_index, (data, target, input_lengths, target_lengths) in enumerate(train_loader):
                optimizer.zero_grad()
                output = model(data)
                output_log_softmax = F.log_softmax(output, dim=-1)
                loss = F.ctc_loss(output_log_softmax, target, input_lengths.view(-1), target_lengths.view(-1))  # <- here
                loss.backward()
                optimizer.step()
            """,
        ),
        op=("ctc_loss", "_ctc_loss"),
        module=(None,),
        fix=r"zero_infinity|longer|input_length|frames|time steps",
        fixed=(("target_lengths.view(-1))", "target_lengths.view(-1), zero_infinity=True)"),),
        works="math.isfinite(loss.item())",
    ),
    ReportCase(
        name="adam_in_half_precision",
        source="https://discuss.pytorch.org/t/adam-half-precision-nans/1765",
        answer="Adam's eps of 1e-8 is 0 in float16, so that a zero second moment divides by 0: use a larger eps such as 1e-4.",
        magic="nanhunt",
        cells=(
            """
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.fc1 = nn.Linear(32, 64)
                    self.fc2 = nn.Linear(64, 10)

                def forward(self, x):
                    return self.fc2(F.relu(self.fc1(x)))

            net = Net().half()
            x = torch.rand(128, 32).half()
            x[:, 7] = 0  # a pixel that is always black
            y = torch.randint(0, 10, (128,))
            """,
            """
            %%nanhunt -o r
            optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)  # <- here
            for i in range(20):
                optimizer.zero_grad()
                output = net(x)
                loss = F.cross_entropy(output.float(), y)
                loss.backward()
                optimizer.step()  # <- here
            """,
        ),
        says=(r"eps", r"float16|half"),
        never=(r"clip", r"lower the learning rate"),
        fix=r"eps=1e-[34567]|float32|float\(\)",
        fixed=(("lr=1e-3)", "lr=1e-3, eps=1e-4)"),),
        works="math.isfinite(loss.item())",
    ),
    ReportCase(
        name="gradient_penalty_of_a_dead_critic",
        source="https://github.com/keras-team/keras-io/issues/910",
        answer="The square root of the gradient's squared norm is taken at 0 where the critic is flat: add a small eps inside it.",
        magic="nanhunt",
        cells=(
            """
            class Critic(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.conv1 = nn.Conv2d(1, 8, 5, stride=2, padding=2)
                    self.conv2 = nn.Conv2d(8, 16, 5, stride=2, padding=2)
                    self.fc = nn.Linear(16 * 7 * 7, 1)

                def forward(self, x):
                    x = F.relu(self.conv1(x))
                    x = F.relu(self.conv2(x))
                    return self.fc(x.flatten(1))

            discriminator = Critic()
            with torch.no_grad():
                discriminator.conv2.bias.fill_(-5)  # as it was left by the steps before
            d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.9))
            gp_weight = 10.0

            def gradient_penalty(batch_size, real_images, fake_images):
                alpha = torch.rand(batch_size, 1, 1, 1)
                interpolated = (real_images + alpha * (fake_images - real_images)).requires_grad_()
                pred = discriminator(interpolated)
                grads = torch.autograd.grad(pred, interpolated, torch.ones_like(pred), create_graph=True)[0]
                norm = torch.sqrt(torch.sum(torch.square(grads), dim=[1, 2, 3]))  # <- here
                return torch.mean((norm - 1.0) ** 2)
            """,
            """
            %%nanhunt -o r
            for i in range(3):
                real_images, fake_images = torch.rand(16, 1, 28, 28), torch.rand(16, 1, 28, 28)
                d_optimizer.zero_grad()
                d_cost = discriminator(fake_images).mean() - discriminator(real_images).mean()
                gp = gradient_penalty(16, real_images, fake_images)
                d_loss = d_cost + gp * gp_weight
                d_loss.backward()
                d_optimizer.step()
            """,
        ),
        op=("sqrt",),
        module=(None,),
        fix=r"sqrt\(torch\.sum\(torch\.square\(grads\), dim=\[1, 2, 3\]\).*(1e-|clamp|eps)",
        fixed=((", dim=[1, 2, 3]))", ", dim=[1, 2, 3]).clamp(min=1e-12))"),),
        works="math.isfinite(d_loss.item())",
    ),
    ReportCase(
        name="detector_box_without_width",
        source="https://github.com/pytorch/vision/issues/2144",
        answer="An image without objects was given the box [0, 0, 0, 0]: log of its width 0 is -inf; give no box, of shape (0, 4).",
        magic="nanhunt",
        cells=(
            """
            def encode_boxes(reference_boxes, proposals):
                ex_widths = proposals[:, 2] - proposals[:, 0]
                ex_heights = proposals[:, 3] - proposals[:, 1]
                ex_ctr_x = proposals[:, 0] + 0.5 * ex_widths
                ex_ctr_y = proposals[:, 1] + 0.5 * ex_heights

                gt_widths = reference_boxes[:, 2] - reference_boxes[:, 0]
                gt_heights = reference_boxes[:, 3] - reference_boxes[:, 1]
                gt_ctr_x = reference_boxes[:, 0] + 0.5 * gt_widths
                gt_ctr_y = reference_boxes[:, 1] + 0.5 * gt_heights

                targets_dx = (gt_ctr_x - ex_ctr_x) / ex_widths
                targets_dy = (gt_ctr_y - ex_ctr_y) / ex_heights
                targets_dw = torch.log(gt_widths / ex_widths)  # <- here
                targets_dh = torch.log(gt_heights / ex_heights)  # <- here
                return torch.stack((targets_dx, targets_dy, targets_dw, targets_dh), dim=1)

            class PedestrianDataset(Dataset):
                def __init__(self):
                    self.labels = [True, True, False, True, False, True]

                def __len__(self):
                    return len(self.labels)

                def __getitem__(self, idx):
                    x1, y1 = torch.randint(0, 20, (2,)).tolist()
                    boxes = []
                    if self.labels[idx]:
                        boxes.append([x1, y1, x1 + 24, y1 + 40])
                    else:
                        boxes.append([0.0,0.0,0.0,0.0])
                    return torch.rand(3, 64, 64), torch.as_tensor(boxes, dtype=torch.float32)

            class RPN(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.conv = nn.Conv2d(3, 16, 3, stride=4, padding=1)
                    self.bbox_pred = nn.Linear(16, 4)

                def forward(self, images):
                    return self.bbox_pred(F.relu(self.conv(images)).mean((2, 3)))

            model = RPN()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=0.0005)
            data_loader = DataLoader(PedestrianDataset(), batch_size=2)
            """,
            """
            %%nanhunt -o r
            for images, boxes in data_loader:
                gt_boxes = boxes.view(-1, 4)
                proposals = torch.tensor([[4., 4., 36., 36.]]).expand(len(gt_boxes), 4)
                regression_targets = encode_boxes(gt_boxes, proposals)
                loss_rpn_box_reg = F.smooth_l1_loss(model(images), regression_targets, beta=1 / 9)
                optimizer.zero_grad()
                loss_rpn_box_reg.backward()
                optimizer.step()
            """,
        ),
        op=("log",),
        module=(None,),
        says=(r"\b0\b",),
        fix=r"clamp|remove|drop|filter|keep|leave out|1e-",
        fixed=(
            ("torch.log(gt_widths / ex_widths)", "torch.log((gt_widths / ex_widths).clamp(min=1e-6))"),
            ("torch.log(gt_heights / ex_heights)", "torch.log((gt_heights / ex_heights).clamp(min=1e-6))"),
        ),
        works="math.isfinite(loss_rpn_box_reg.item())",
    ),
    ReportCase(
        name="zero_by_zero_meant_to_be_one",
        source="https://discuss.pytorch.org/t/special-treatment-of-0-0/161107",
        answer="torch.where does not stop the gradient of the branch not taken: 0/0 there gives NaN; make the divisor safe first.",
        magic="nanhunt",
        cells=(
            """
            class Knots(nn.Module):
                def __init__(self, a, b):
                    super().__init__()
                    self.a = nn.Parameter(a)
                    self.b = nn.Parameter(b)

                def forward(self, x):
                    a, b = self.a, self.b
                    c = torch.where(a == b, 1., (x - a) / (b - a))  # <- here
                    return c

            a = torch.tensor([1., 2., 3., 6.])
            b = torch.tensor([2., 4., 5., 6.])
            basis = Knots(a, b)
            x = 6
            optimizer = torch.optim.Adam(basis.parameters(), lr=1e-2)
            """,
            """
            %%nanhunt -o r
            for i in range(3):
                optimizer.zero_grad()
                loss = (basis(x) - torch.tensor([2., 1., 1., 1.])).pow(2).sum()
                loss.backward()
                optimizer.step()
            """,
        ),
        op=("div",),
        module=("",),
        fix=r"where\(.*(b - a|divisor|denominator|safe)|safe|before",
        fixed=(("(x - a) / (b - a))", "(x - a) / torch.where(a == b, 1., b - a))"),),
        works="math.isfinite(loss.item()) and bool(torch.isfinite(basis.a).all())",
    ),
    ReportCase(
        name="nan_written_beside_the_element_that_is_used",
        source="https://whosebug.com/question/5957504/PyTorch-backward-on-a-tensor-element-affected-by-nan-in-other-elements",
        answer="z[0] and z[1] are one tensor: the zero gradient that flows back to x * y / y becomes 0 * NaN; keep the two apart, or mask.",
        magic="nanhunt",
        cells=(
            """
            x = torch.tensor(1., requires_grad=True)
            y = torch.tensor(0., requires_grad=True)
            """,
            """
            %%nanhunt -o r
            z = torch.full((2, ), float("nan"))
            z[0] = x * y / y  # <- here
            z[1] = x + y
            print(z)  # tensor([nan, 1.], grad_fn=<CopySlices>)

            z[1].backward()
            print(x.grad)  # tensor(nan)
            """,
        ),
        op=("div",),
        module=(None,),
        fix=r"where|mask|separate|detach|apart|clamp|1e-",
        fixed=(
            ("z[0] = x * y / y", "z0 = x * y / y"),
            ("z[1] = x + y", "z1 = x + y"),
            ("print(z)", "print(z0, z1)"),
            ("z[1].backward", "z1.backward"),
        ),
        works="x.grad.item() == 1",
    ),
    ReportCase(
        name="masked_log_softmax_of_a_fully_masked_row",
        source="https://github.com/allenai/allennlp/issues/890",
        answer="The log of an all-zero mask is -inf in the whole row, and log_softmax of that is NaN: take the log of mask + 1e-45.",
        magic="nanhunt",
        cells=(
            """
            def masked_log_softmax(vector, mask, dim=-1):
                if mask is not None:
                    vector = vector + mask.log()  # <- here
                return torch.nn.functional.log_softmax(vector, dim=dim)  # <- here
            """,
            """
            %%nanhunt -o r
            vector = torch.tensor([[0.3725, 0.5344, 0.2128, 0.3324, 0.2745, 0.2454],
                                   [0.3423, 0.3423, 0.3423, 0.3423, 0.3423, 0.3423]])
            mask = torch.tensor([[1., 1., 1., 1., 1., 1.],
                                 [0., 0., 0., 0., 0., 0.]])
            vector_log_probs = masked_log_softmax(vector, mask)
            print(vector_log_probs)
            """,
        ),
        op=("log", "_log_softmax", "log_softmax"),
        module=(None,),
        says=(r"row",),
        fix=r"1e-|clamp|eps|finfo|at least one|where",
        fixed=(("mask.log()", "(mask + 1e-45).log()"),),
        works="bool(torch.isfinite(vector_log_probs).all())",
    ),
    ReportCase(
        name="graph_autoencoder_with_a_free_log_variance",
        source="https://github.com/pyg-team/pytorch_geometric/issues/500",
        answer="Nothing bounds logvar, and its exp overflows: clamp it right after the encoder.",
        magic="nanhunt",
        cells=(
            """
            EPS = 1e-15

            class GCNConv(nn.Module):
                def __init__(self, in_channels, out_channels):
                    super().__init__()
                    self.weight = nn.Parameter(torch.empty(in_channels, out_channels))
                    nn.init.xavier_uniform_(self.weight)

                def forward(self, x, adj):
                    deg = adj.sum(1).clamp(min=1).pow(-0.5)
                    return (deg[:, None] * adj * deg[None, :]) @ (x @ self.weight)

            class Encoder(nn.Module):
                def __init__(self, in_channels, out_channels):
                    super().__init__()
                    self.conv1 = GCNConv(in_channels, 2 * out_channels)
                    self.conv_mu = GCNConv(2 * out_channels, out_channels)
                    self.conv_logvar = GCNConv(2 * out_channels, out_channels)

                def forward(self, x, adj):
                    x = F.relu(self.conv1(x, adj))
                    return self.conv_mu(x, adj), self.conv_logvar(x, adj)

            class VGAE(nn.Module):
                def __init__(self, encoder):
                    super().__init__()
                    self.encoder = encoder

                def reparametrize(self, mu, logvar):
                    if self.training:
                        return mu + torch.randn_like(logvar) * torch.exp(logvar)  # <- here
                    else:
                        return mu

                def encode(self, *args, **kwargs):
                    self.__mu__, self.__logvar__ = self.encoder(*args, **kwargs)
                    z = self.reparametrize(self.__mu__, self.__logvar__)
                    return z

                def kl_loss(self):
                    mu, logvar = self.__mu__, self.__logvar__
                    return -0.5 * torch.mean(torch.sum(1 + logvar - mu**2 - logvar.exp(), dim=1))

                def recon_loss(self, z, adj):
                    prob = torch.sigmoid(z @ z.t())
                    return -torch.log(torch.where(adj > 0, prob, 1 - prob) + EPS).mean()

            num_nodes, channels = 100, 16
            x = 400 * torch.rand(num_nodes, 64)  # word counts, as they come
            adj = (torch.rand(num_nodes, num_nodes) < 0.05).float()
            adj = ((adj + adj.t() + torch.eye(num_nodes)) > 0).float()
            model = VGAE(Encoder(64, channels))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            """,
            """
            %%nanhunt -o r
            for epoch in range(3):
                model.train()
                optimizer.zero_grad()
                z = model.encode(x, adj)
                loss = model.recon_loss(z, adj) + (1 / num_nodes) * model.kl_loss()
                loss.backward()
                optimizer.step()
            """,
        ),
        op=("exp",),
        module=(None, ""),
        fix=r"logvar\.?.*clamp|clamp\(.*logvar",
        fixed=(
            ("torch.exp(logvar)", "torch.exp(logvar.clamp(max=10))"),
            ("logvar.exp()", "logvar.clamp(max=10).exp()"),
        ),
        works="math.isfinite(loss.item())",
    ),
    ReportCase(
        name="background_embedding_that_nobody_initialized",
        source="https://github.com/sauradip/STALE/issues/16",
        answer="The parameter is torch.empty(1, 512): whatever was in that memory, NaN too; initialize it.",
        magic="nanhunt",
        cells=(
            """
            torch.use_deterministic_algorithms(True)  # which also fills new memory with NaN
            """,
            """
            class STALE(nn.Module):
                def __init__(self, num_classes=20, embed_dim=512):
                    super().__init__()
                    self.temporal = nn.Linear(256, embed_dim)
                    self.txt_embeddings = nn.Parameter(torch.randn(num_classes, embed_dim))
                    self.bg_embeddings = nn.Parameter(torch.empty(1, 512))

                def forward(self, snip):
                    vid_feature = self.temporal(snip)
                    text_feat = torch.cat([self.txt_embeddings, self.bg_embeddings], dim=0)
                    vid_feature = vid_feature / vid_feature.norm(dim=-1, keepdim=True)
                    text_feat = text_feat / text_feat.norm(dim=-1, keepdim=True)
                    return 100 * vid_feature @ text_feat.t()
            """,
            """
            %%nanhunt -o r
            model = STALE()
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
            for step in range(3):
                snippets, labels = torch.randn(8, 256), torch.randint(0, 21, (8,))
                optimizer.zero_grad()
                loss = F.cross_entropy(model(snippets), labels)
                loss.backward()
                optimizer.step()
            """,
        ),
        line=False,
        says=(r"bg_embeddings", r"initiali[sz]ed"),
        never=(r"earlier run", r"poisoned"),
        fix=r"init|zeros|randn",
        fixed=(("nn.Parameter(torch.empty(1, 512))", "nn.Parameter(torch.randn(1, 512))"),),
        works="math.isfinite(loss.item())",
    ),
    ReportCase(
        name="rain_that_never_fell_standardized",
        source="https://github.com/mllam/neural-lam/issues/136",
        answer="A field that is the same everywhere has a standard deviation of 0: standardize only where it is not 0.",
        magic="nanhunt",
        cells=(
            """
            class WeatherDataset(Dataset):
                def __init__(self, fields, ar_steps=3, standardize=True):
                    self.fields = fields  # (time, grid, variable)
                    self.ar_steps = ar_steps
                    self.standardize = standardize
                    self.da_state_mean = fields.mean((0, 1))
                    self.da_state_std = fields.std((0, 1))

                def __len__(self):
                    return len(self.fields) - self.ar_steps

                def __getitem__(self, idx):
                    state = self.fields[idx : idx + self.ar_steps]
                    if self.standardize:
                        state = (state - self.da_state_mean) / self.da_state_std  # <- here
                    return state[:2], state[2]

            fields = torch.randn(40, 64, 4) * torch.tensor([5., 2., 1000., 1.])
            fields[..., 3] = 0  # rain
            loader = DataLoader(WeatherDataset(fields), batch_size=8, shuffle=True)
            model = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 4))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            """,
            """
            %%nanhunt -o r
            for epoch in range(2):
                for init_states, target_states in loader:
                    prediction = model(init_states.permute(0, 2, 1, 3).flatten(2))
                    loss = F.mse_loss(prediction, target_states)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            """,
        ),
        op=("div",),
        fix=r"da_state_std.*(clamp|1e-|where|\+)|standard",
        fixed=(("/ self.da_state_std", "/ self.da_state_std.clamp(min=1e-6)"),),
        works="math.isfinite(loss.item())",
    ),
    ReportCase(
        name="boston_prices_with_raw_features",
        source="https://syntaxbug.com/d1e7d3ba69/",
        answer="The features are not scaled and the learning rate is too high for them: the loss grows until it overflows.",
        magic="nanhunt",
        cells=(
            """
            # LSTAT, CRIM, RM
            features = torch.stack((20 * torch.rand(506) + 2, 30 * torch.rand(506) ** 4, 2 * torch.randn(506) + 6), dim=1)
            labels = 35 - features[:, 0] - 0.1 * features[:, 1] + torch.randn(506)

            def data_iter(batch_size, features, labels):
                num_examples = len(features)
                indices = list(range(num_examples))
                random.shuffle(indices)
                for i in range(0, num_examples, batch_size):
                    j = torch.LongTensor(indices[i: min(i + batch_size, num_examples)])
                    yield features.index_select(0, j), labels.index_select(0, j)

            def linreg(X, w, b):
                return torch.mm(X, w) + b

            def squared_loss(y_hat, y):
                return (y_hat - y.view(y_hat.size())) ** 2 / 2

            def sgd(params, lr, batch_size):
                for param in params:
                    param.data -= lr * param.grad / batch_size

            w = torch.tensor(np.random.normal(0, 0.01, (3, 1)), dtype=torch.float32).requires_grad_(True)
            b = torch.zeros(1, dtype=torch.float32, requires_grad=True)
            """,
            """
            %%nanhunt -o r
            lr = 0.03
            num_epochs = 10
            batch_size = 10
            net = linreg
            loss = squared_loss
            for epoch in range(num_epochs):
                for X, y in data_iter(batch_size, features, labels):
                    l = loss(net(X, w, b), y).sum()
                    l.backward()
                    sgd([w, b], lr, batch_size)
                    w.grad.data.zero_()
                    b.grad.data.zero_()
                train_l = loss(net(features, w, b), labels)
                print('epoch %d, loss %f' % (epoch + 1, train_l.mean().item()))
            """,
        ),
        line=False,
        says=(r"diverge|grew|grow|overflow|explod",),
        never=(r"clip", r"target", r"clamp", r"(?<!diverged: Inf )from (pow|mul|mse_loss)"),
        fix=r"\blr\b|learning rate|standardi[sz]e|normali[sz]e",
        fixed=(("lr = 0.03", "lr = 0.001"),),
        works="math.isfinite(train_l.mean().item())",
    ),
    ReportCase(
        name="mri_volumes_with_nan_voxels",
        source="https://github.com/aramis-lab/clinicadl/issues/106",
        answer="Some images hold NaN voxels: replace them in the data set, and warn.",
        magic="nanhunt",
        cells=(
            """
            class CAPSDataset(Dataset):
                def __init__(self, images, labels):
                    self.images, self.labels = images, labels

                def __len__(self):
                    return len(self.images)

                def __getitem__(self, idx):
                    image = self.images[idx]
                    image = (image - image.min()) / (image.max() - image.min()) if not image.isnan().any() else image
                    return {'image': image, 'label': self.labels[idx], 'participant_id': f'sub-{idx:03d}'}

            class Conv5_FC3(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.convolutions = nn.Sequential(
                        nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.LeakyReLU(), nn.MaxPool3d(2, 2),
                        nn.Conv3d(4, 8, 3, padding=1), nn.BatchNorm3d(8), nn.LeakyReLU(), nn.AdaptiveAvgPool3d(2),
                    )
                    self.fc = nn.Sequential(nn.Flatten(), nn.Dropout(p=0.5), nn.Linear(64, 2))

                def forward(self, x):
                    return self.fc(self.convolutions(x))

            images = torch.rand(12, 1, 10, 12, 10)
            images[7, 0, :2, 3:5, 0] = float('nan')  # outside the brain
            train_loader = DataLoader(CAPSDataset(images, torch.arange(12) % 2), batch_size=4)
            model = Conv5_FC3()
            criterion = nn.CrossEntropyLoss(reduction='sum')
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
            """,
            """
            %%nanhunt -o r
            model.train()
            for i, data in enumerate(train_loader, 0):
                imgs, labels = data['image'], data['label']
                train_output = model(imgs)
                loss = criterion(train_output, labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            """,
        ),
        line=False,
        says=(r"imgs|image", r"row 3|rows? 3|sample 3"),
        never=(r"isfinite\(\w+\)\.all\(1\)",),
        fix=r"nan_to_num|isnan|isfinite|replace|drop|clean",
        fixed=(("imgs, labels = data['image'], data['label']", "imgs, labels = torch.nan_to_num(data['image']), data['label']"),),
        works="math.isfinite(loss.item())",
    ),
    ReportCase(
        name="causal_mask_that_is_as_it_should_be",
        source="https://discuss.pytorch.org/t/should-transformers-causal-attention-mask-be-upper-triangular-or-lower-triangular/205396",
        answer="Nothing is wrong: -inf above the diagonal is what a causal mask is made of.",
        magic="nanhunt",
        healthy=True,
        cells=(
            """
            d_model, nhead, vocab = 32, 4, 50
            embed = nn.Embedding(vocab, d_model)
            encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(d_model, nhead, 64, batch_first=True), num_layers=2)
            head = nn.Linear(d_model, vocab)
            params = [*embed.parameters(), *encoder.parameters(), *head.parameters()]
            optimizer = torch.optim.Adam(params, lr=1e-3)
            """,
            """
            %%nanhunt -o r
            model = nn.Transformer(32, 4, 1, 1)
            mask = model.generate_square_subsequent_mask(sz=4)
            print(mask)

            causal = nn.Transformer.generate_square_subsequent_mask(12)
            for step in range(4):
                tokens = torch.randint(0, vocab, (8, 13))
                hidden = encoder(embed(tokens[:, :-1]), mask=causal, is_causal=True)
                loss = F.cross_entropy(head(hidden).flatten(0, 1), tokens[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

            scores = torch.randn(2, 12, 12) + causal
            print(scores.max(), F.softmax(scores, dim=-1)[0, 0])
            """,
        ),
    ),
    ReportCase(
        name="total_grad_norm_is_nan_at_first",
        source="https://github.com/RobinWu218/SimDINO/issues/38",
        answer="Nothing is wrong: the scaler starts too high, skips these steps and lowers its scale; without it the norms are finite.",
        magic="nanhunt",
        healthy=True,
        cells=(
            """
            class Backbone(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.blocks = nn.Sequential(nn.Linear(48, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU())
                    self.head = nn.Linear(128, 64)

                def forward(self, x):
                    return self.head(self.blocks(x))

            student, teacher = Backbone(), Backbone()
            teacher.load_state_dict(student.state_dict())
            optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4)
            fp16_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
            metrics = []
            """,
            """
            %%nanhunt -o r
            for it in range(20):
                crops = torch.randn(32, 48)
                with torch.amp.autocast("cpu", dtype=torch.float16):
                    with torch.no_grad():
                        teacher_out = teacher(crops)
                    loss = ((student(crops + 0.1 * torch.randn_like(crops)) - teacher_out) ** 2).sum(-1).mean()
                optimizer.zero_grad()
                fp16_scaler.scale(loss).backward()
                fp16_scaler.unscale_(optimizer)
                total_grad_norm = nn.utils.clip_grad_norm_(student.parameters(), 3.0)
                fp16_scaler.step(optimizer)
                fp16_scaler.update()
                metrics.append((loss.item(), total_grad_norm.item()))
                with torch.no_grad():
                    for ps, pt in zip(student.parameters(), teacher.parameters()):
                        pt.mul_(0.99).add_(ps, alpha=0.01)
            print(metrics[:3], metrics[-1])
            """,
        ),
    ),
    ReportCase(
        name="missing_pathology_labels_are_nan_on_purpose",
        source="https://github.com/mlmed/torchxrayvision/issues/119",
        answer="Nothing is wrong: absent labels are NaN, and the training script leaves them out of the loss.",
        magic="nanhunt",
        healthy=True,
        cells=(
            """
            class XRays(Dataset):
                def __init__(self, n=32, pathologies=5):
                    self.img = torch.rand(n, 1, 24, 24)
                    self.lab = (torch.rand(n, pathologies) > 0.5).float()
                    self.lab[torch.rand(n, pathologies) < 0.3] = float("nan")
                    self.lab[:, 4] = float("nan")  # this hospital does not look for it

                def __len__(self):
                    return len(self.img)

                def __getitem__(self, idx):
                    return {"img": self.img[idx], "lab": self.lab[idx]}

            model = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 5))
            criterion = torch.nn.BCEWithLogitsLoss()
            optim = torch.optim.Adam(model.parameters(), lr=1e-3)
            train_loader = DataLoader(XRays(), batch_size=8)
            avg_loss = []
            """,
            """
            %%nanhunt -o r
            model.train()
            for batch_idx, samples in enumerate(train_loader):
                optim.zero_grad()
                images = samples["img"].float()
                targets = samples["lab"]
                outputs = model(images)

                loss = torch.zeros(1).float()
                for task in range(targets.shape[1]):
                    task_output = outputs[:,task]
                    task_target = targets[:,task]
                    mask = ~torch.isnan(task_target)
                    task_output = task_output[mask]
                    task_target = task_target[mask]
                    if len(task_target) > 0:
                        task_loss = criterion(task_output.float(), task_target.float())
                        loss += task_loss

                loss = loss.sum()
                loss.backward()
                avg_loss.append(loss.detach().cpu().numpy())
                optim.step()
            """,
        ),
    ),
)
