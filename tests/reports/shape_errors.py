"""Shapes that did not fit, or fitted and were not meant: what people asked, and what it was."""

from __future__ import annotations

from tests.reports.case import ReportCase

CASES: tuple[ReportCase, ...] = (
    # --- a loss that broadcasts, or a difference before it ---
    ReportCase(
        name="conet_smooth_l1_of_a_depth_without_channel",
        source="https://github.com/jiwei0921/CoNet/issues/3",
        answer="The prediction is [2, 1, 256, 256] and the depth map [2, 256, 256]: depth = depth.unsqueeze(1).",
        magic="shapes",
        cells=(
            """
            class CoNet(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
                    self.high = nn.Conv2d(8, 1, 3, padding=1)
                    self.pred = nn.Conv2d(8, 1, 1)

                def forward(self, x):
                    x = self.backbone(x)
                    return self.high(x), self.pred(x)

            model = CoNet()
            optim = torch.optim.SGD(model.parameters(), lr=1e-10, momentum=0.9)
            images, depths = torch.rand(6, 3, 256, 256), torch.rand(6, 256, 256)
            loader = DataLoader(TensorDataset(images, depths), batch_size=2)
            """,
            """
            %%shapes -o r
            for image, depth in loader:
                optim.zero_grad()
                high_depth, pred_depth = model(image)
                loss4 = F.smooth_l1_loss(high_depth, depth, reduction='sum')  # <- here
                loss6 = F.smooth_l1_loss(pred_depth, depth, reduction='sum')  # <- here
                loss = loss4 + loss6
                loss.backward()
                optim.step()
            """,
        ),
        op=("smooth_l1_loss",),
        says=("broadcast", r"2 x 2 x 256 x 256|2 x 256 x 256"),
        fix=r"depth\.unsqueeze\(1\)|_depth\.squeeze\(1\)",
        fixed=(("high_depth, depth,", "high_depth, depth.unsqueeze(1),"), ("pred_depth, depth,", "pred_depth, depth.unsqueeze(1),")),
        works="math.isfinite(loss.item())",
    ),
    ReportCase(
        name="cleanrl_sac_actor_loss",
        source="https://github.com/vwxyzjn/cleanrl/issues/379",
        answer="min_qf_pi was flattened to [batch], log_pi is [batch, 1]: their difference is [batch, batch]; drop the view(-1).",
        magic="shapes",
        cells=(
            """
            class SoftQNetwork(nn.Module):
                def __init__(self, obs, act):
                    super().__init__()
                    self.fc1 = nn.Linear(obs + act, 256)
                    self.fc2 = nn.Linear(256, 256)
                    self.fc3 = nn.Linear(256, 1)

                def forward(self, x, a):
                    x = torch.cat([x, a], 1)
                    x = F.relu(self.fc1(x))
                    x = F.relu(self.fc2(x))
                    return self.fc3(x)

            class Actor(nn.Module):
                def __init__(self, obs, act):
                    super().__init__()
                    self.fc1 = nn.Linear(obs, 256)
                    self.fc2 = nn.Linear(256, 256)
                    self.fc_mean = nn.Linear(256, act)
                    self.fc_logstd = nn.Linear(256, act)

                def forward(self, x):
                    x = F.relu(self.fc1(x))
                    x = F.relu(self.fc2(x))
                    return self.fc_mean(x), torch.tanh(self.fc_logstd(x))

                def get_action(self, x):
                    mean, log_std = self(x)
                    normal = torch.distributions.Normal(mean, log_std.exp())
                    x_t = normal.rsample()
                    y_t = torch.tanh(x_t)
                    log_prob = normal.log_prob(x_t) - torch.log(1 - y_t.pow(2) + 1e-6)
                    log_prob = log_prob.sum(1, keepdim=True)
                    return y_t, log_prob, torch.tanh(mean)

            actor, qf1, qf2 = Actor(17, 6), SoftQNetwork(17, 6), SoftQNetwork(17, 6)
            actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)
            observations = torch.randn(256, 17)
            alpha = 0.2
            """,
            """
            %%shapes -o r
            for _ in range(2):
                pi, log_pi, _ = actor.get_action(observations)
                qf1_pi = qf1(observations, pi)
                qf2_pi = qf2(observations, pi)
                min_qf_pi = torch.min(qf1_pi, qf2_pi).view(-1)  # <- here
                actor_loss = ((alpha * log_pi) - min_qf_pi).mean()  # <- here
                actor_optimizer.zero_grad()
                actor_loss.backward()
                actor_optimizer.step()
            """,
        ),
        op=("sub", "__sub__", "view"),
        says=("broadcast|256 x 256", "256 x 1"),
        fix=r"squeeze|view\(-1\)|flatten|unsqueeze",
        fixed=(("((alpha * log_pi) - min_qf_pi)", "((alpha * log_pi).squeeze(1) - min_qf_pi)"),),
        works="math.isfinite(actor_loss.item())",
    ),
    ReportCase(
        name="a2c_advantage_without_backward_through_it",
        source="https://github.com/PacktPublishing/Deep-Reinforcement-Learning-Hands-On/issues/74",
        answer="vals_ref_v is [128] and value_v [128, 1], so adv_v is [128, 128]: value_v.squeeze(-1).detach().",
        magic="shapes",
        cells=(
            """
            class A2C(nn.Module):
                def __init__(self, n_inputs, n_actions):
                    super().__init__()
                    self.body = nn.Sequential(nn.Linear(n_inputs, 64), nn.ReLU())
                    self.policy = nn.Linear(64, n_actions)
                    self.value = nn.Linear(64, 1)

                def forward(self, x):
                    x = self.body(x)
                    return self.policy(x), self.value(x)

            BATCH_SIZE, ENTROPY_BETA = 128, 0.01
            net = A2C(24, 6)
            optimizer = torch.optim.Adam(net.parameters(), lr=0.001, eps=1e-3)
            states_v = torch.randn(BATCH_SIZE, 24)
            actions_t = torch.randint(0, 6, (BATCH_SIZE,))
            vals_ref_v = torch.rand(BATCH_SIZE)
            """,
            """
            %%shapes -o r
            optimizer.zero_grad()
            logits_v, value_v = net(states_v)
            loss_value_v = F.mse_loss(value_v.squeeze(-1), vals_ref_v)

            log_prob_v = F.log_softmax(logits_v, dim=1)
            adv_v = vals_ref_v - value_v.detach()  # <- here
            log_prob_actions_v = adv_v * log_prob_v[range(BATCH_SIZE), actions_t]
            loss_policy_v = -log_prob_actions_v.mean()

            prob_v = F.softmax(logits_v, dim=1)
            entropy_loss_v = ENTROPY_BETA * (prob_v * log_prob_v).sum(dim=1).mean()
            loss_policy_v.backward(retain_graph=True)
            (entropy_loss_v + loss_value_v).backward()
            optimizer.step()
            """,
        ),
        op=("sub", "__sub__"),
        says=("128 x 128", "128 x 1"),
        fix=r"value_v.*squeeze|value_v.*(view|flatten|\[:, 0\])|vals_ref_v\.unsqueeze\(1\)",
        fixed=(("vals_ref_v - value_v.detach()", "vals_ref_v - value_v.detach().squeeze(1)"),),
        works="adv_v.shape == (128,)",
    ),
    ReportCase(
        name="iqn_quantile_huber_is_meant",
        source="https://github.com/Kchu/DeepRL_PyTorch/issues/1",
        answer="Not a bug: the quantile Huber loss compares every quantile with every target quantile.",
        magic="shapes",
        healthy=True,
        cells=(
            """
            N_ACTIONS, N_QUANT = 4, 64

            class ConvNet(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.feature = nn.Linear(8, 128)
                    self.phi = nn.Linear(1, 128, bias=False)
                    self.fc = nn.Linear(128, 64)
                    self.fc_q = nn.Linear(64, N_ACTIONS)

                def forward(self, x):
                    mb_size = x.size(0)
                    x = F.relu(self.feature(x))
                    tau = torch.rand(N_QUANT, 1)
                    quants = torch.arange(0, N_QUANT, 1.0)
                    cos_trans = torch.cos(quants * tau * 3.141592).unsqueeze(2)
                    rand_feat = F.relu(self.phi(cos_trans).mean(dim=1)).unsqueeze(0)
                    x = x.unsqueeze(1)
                    x = x * rand_feat
                    x = F.relu(self.fc(x))
                    action_value = self.fc_q(x).transpose(1, 2)
                    return action_value, tau

            pred_net, target_net = ConvNet(), ConvNet()
            optimizer = torch.optim.Adam(pred_net.parameters(), lr=1e-4)
            b_s, b_s_, b_a, b_r = torch.randn(32, 8), torch.randn(32, 8), torch.randint(0, N_ACTIONS, (32,)), torch.randn(32)
            """,
            """
            %%shapes -o r
            q_eval, q_eval_tau = pred_net(b_s)
            mb_size = q_eval.size(0)
            q_eval = torch.stack([q_eval[i].index_select(0, b_a[i]) for i in range(mb_size)]).squeeze(1)
            q_eval = q_eval.unsqueeze(2)

            q_next, q_next_tau = target_net(b_s_)
            best_actions = q_next.mean(dim=2).argmax(dim=1)
            q_next = torch.stack([q_next[i].index_select(0, best_actions[i]) for i in range(mb_size)]).squeeze(1)
            q_target = b_r.unsqueeze(1) + 0.99 * q_next
            q_target = q_target.unsqueeze(1)

            u = q_target.detach() - q_eval
            tau = q_eval_tau.unsqueeze(0)
            weight = torch.abs(tau - u.le(0.).float())
            loss = F.smooth_l1_loss(q_eval, q_target.detach(), reduction='none')
            loss = torch.mean(weight * loss, dim=1).mean(dim=1)
            loss = loss.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            """,
        ),
    ),
    ReportCase(
        name="pytorch_book_logistic_regression",
        source="https://github.com/lucidfrontier45/PyTorch-Book/issues/3",
        answer="The network gives [100, 1], the labels are [100]: loss_fn(y_pred.view_as(y), y).",
        magic="shapes",
        cells=(
            """
            X = torch.tensor(np.random.rand(100, 4), dtype=torch.float32)
            y = torch.tensor(np.repeat([0, 1], 50), dtype=torch.float32)
            net = nn.Linear(4, 1)
            loss_fn = nn.BCEWithLogitsLoss()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
            losses = []
            """,
            """
            for epoc in range(100):
                optimizer.zero_grad()
                y_pred = net(X)
                loss = loss_fn(y_pred, y)  # <- here
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            """,
            "%shapes -o r",
        ),
        op=("binary_cross_entropy_with_logits",),
        fix=r"y_pred\.(view_as\(y\)|squeeze\((1|-1)\)|flatten\(\)|view\(-1\))|y\.unsqueeze\(1\)",
        fixed=(("loss_fn(y_pred, y)", "loss_fn(y_pred.squeeze(1), y)"),),
        works="len(losses) == 100",
    ),
    # --- a loss that does not fit: which module made the wrong side ---
    ReportCase(
        name="discogan_discriminator_of_larger_pictures",
        source="https://github.com/carpedm20/DiscoGAN-pytorch/issues/19",
        answer="The discriminator ends in one number a picture only for 64 x 64; at 256 it gives 13 x 13 = 169 numbers: "
        "shrink further (pooling, a larger last kernel), or scale the pictures to 64.",
        magic="shapes",
        cells=(
            """
            class DiscriminatorCNN(nn.Module):
                def __init__(self, input_channel, output_channel, hidden_dims):
                    super().__init__()
                    self.layers = []
                    prev_dim = hidden_dims[0]
                    self.layers.append(nn.Conv2d(input_channel, prev_dim, 4, 2, 1, bias=False))
                    self.layers.append(nn.LeakyReLU(0.2, inplace=True))
                    for out_dim in hidden_dims[1:]:
                        self.layers.append(nn.Conv2d(prev_dim, out_dim, 4, 2, 1, bias=False))
                        self.layers.append(nn.BatchNorm2d(out_dim))
                        self.layers.append(nn.LeakyReLU(0.2, inplace=True))
                        prev_dim = out_dim
                    self.layers.append(nn.Conv2d(prev_dim, output_channel, 4, 1, 0, bias=False))
                    self.layers.append(nn.Sigmoid())
                    self.layer_module = nn.ModuleList(self.layers)

                def main(self, x):
                    out = x
                    for layer in self.layer_module:
                        out = layer(out)
                    return out.view(out.size(0), -1)

                def forward(self, x):
                    return self.main(x)

            input_scale_size, batch_size = 256, 4
            D_A = DiscriminatorCNN(1, 1, [16, 32, 64, 128])
            bce = nn.BCELoss()
            x_A = torch.rand(batch_size, 1, input_scale_size, input_scale_size)
            real_tensor = torch.FloatTensor(batch_size).fill_(1)
            """,
            """
            %%shapes -o r
            l_d_A_real = bce(D_A(x_A).squeeze(1), real_tensor)  # <- here
            l_d_A_real.backward()
            """,
        ),
        op=("binary_cross_entropy",),
        says=("13 x 13|169", "layer_module"),
        never=(r"real_tensor\.(expand|repeat)",),
        fix=r"kernel_size=16|Conv2d\(128, 1, 16|pool|64|mean",
        fixed=(("prev_dim, output_channel, 4, 1, 0, bias=False", "prev_dim, output_channel, kernel_size=16, bias=False"),),
        works="D_A(x_A).shape == (4, 1)",
    ),
    ReportCase(
        name="autoencoder_transposed_convolutions_without_output_padding",
        source="https://pythonfixing.com/2022/02/fixed-convolution-and-convolution.html",
        answer="A transposed convolution of stride 2 undoes a convolution only with output_padding=1: 12 becomes 23, not 24.",
        magic="shapes",
        cells=(
            """
            class AutoEncoder(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.encoder = nn.Sequential(
                        nn.Conv2d(3, 32, 3, padding=1, stride=2), nn.ReLU(), nn.BatchNorm2d(32),
                        nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.ReLU(), nn.BatchNorm2d(64),
                        nn.Conv2d(64, 128, 3, padding=1, stride=2), nn.ReLU(), nn.BatchNorm2d(128),
                    )
                    self.decoder = nn.Sequential(
                        nn.ConvTranspose2d(128, 64, 3, padding=1, stride=2), nn.ReLU(), nn.BatchNorm2d(64),
                        nn.ConvTranspose2d(64, 32, 3, padding=1, stride=2), nn.ReLU(), nn.BatchNorm2d(32),
                        nn.ConvTranspose2d(32, 3, 3, padding=1, stride=2), nn.Sigmoid(),
                    )

                def forward(self, x):
                    return self.decoder(self.encoder(x))

            model = AutoEncoder()
            criterion = nn.MSELoss()
            optimizer = torch.optim.Adam(model.parameters())
            images = torch.rand(8, 3, 96, 96)
            """,
            """
            %%shapes -o r
            optimizer.zero_grad()
            recon = model(images)
            loss = criterion(recon, images)  # <- here
            loss.backward()
            optimizer.step()
            """,
        ),
        op=("mse_loss",),
        says=(r"decoder(\.|\[)\d", "89", "96"),
        fix=r"output_padding\s*=\s*\(?1",
        fixed=(
            (
                "nn.ConvTranspose2d(128, 64, 3, padding=1, stride=2)",
                "nn.ConvTranspose2d(128, 64, 3, padding=1, stride=2, output_padding=1)",
            ),
            ("nn.ConvTranspose2d(64, 32, 3, padding=1, stride=2)", "nn.ConvTranspose2d(64, 32, 3, padding=1, stride=2, output_padding=1)"),
            ("nn.ConvTranspose2d(32, 3, 3, padding=1, stride=2)", "nn.ConvTranspose2d(32, 3, 3, padding=1, stride=2, output_padding=1)"),
        ),
        works="recon.shape == images.shape",
    ),
    ReportCase(
        name="agc_decoder_of_an_odd_stride",
        source="https://github.com/AudiogenAI/agc/pull/4",
        answer="With an odd stride a transposed convolution gives one sample too few: output_padding=stride % 2.",
        magic="shapes",
        cells=(
            """
            from torch.nn.utils.parametrizations import weight_norm

            def WNConv1d(*args, **kwargs):
                return weight_norm(nn.Conv1d(*args, **kwargs))

            def WNConvTranspose1d(*args, **kwargs):
                return weight_norm(nn.ConvTranspose1d(*args, **kwargs))

            class Snake1d(nn.Module):
                def __init__(self, channels):
                    super().__init__()
                    self.alpha = nn.Parameter(torch.ones(1, channels, 1))

                def forward(self, x):
                    return x + (self.alpha + 1e-9).reciprocal() * torch.sin(self.alpha * x).pow(2)

            class EncoderBlock(nn.Module):
                def __init__(self, dim=16, stride=1):
                    super().__init__()
                    self.block = nn.Sequential(Snake1d(dim // 2),
                        WNConv1d(dim // 2, dim, kernel_size=2 * stride, stride=stride, padding=math.ceil(stride / 2)))

                def forward(self, x):
                    return self.block(x)

            class DecoderBlock(nn.Module):
                def __init__(self, input_dim=16, output_dim=8, stride=1):
                    super().__init__()
                    self.block = nn.Sequential(Snake1d(input_dim),
                        WNConvTranspose1d(input_dim, output_dim, kernel_size=2 * stride, stride=stride, padding=math.ceil(stride / 2)))

                def forward(self, x):
                    return self.block(x)

            class AGC(nn.Module):
                def __init__(self, rates=(2, 4, 5)):
                    super().__init__()
                    dim, layers = 8, [WNConv1d(2, 8, kernel_size=7, padding=3)]
                    for stride in rates:
                        dim *= 2
                        layers.append(EncoderBlock(dim, stride))
                    self.encoder = nn.Sequential(*layers)
                    layers = []
                    for stride in reversed(rates):
                        layers.append(DecoderBlock(dim, dim // 2, stride))
                        dim //= 2
                    layers.append(WNConv1d(dim, 2, kernel_size=7, padding=3))
                    self.decoder = nn.Sequential(*layers)

                def forward(self, audio):
                    return self.decoder(self.encoder(audio))

            agc = AGC()
            audio = torch.randn(1, 2, 4800)
            """,
            """
            %%shapes -o r
            reconstructed_audio = agc(audio)
            loss = F.l1_loss(reconstructed_audio, audio)  # <- here
            """,
        ),
        op=("l1_loss",),
        says=(r"decoder(\.|\[)0", "4792", "4800"),
        fix=r"output_padding\s*=\s*\(?1|output_padding=stride % 2",
        fixed=(
            (
                "output_dim, kernel_size=2 * stride, stride=stride, padding=math.ceil(stride / 2)",
                "output_dim, kernel_size=2 * stride, stride=stride, padding=math.ceil(stride / 2), output_padding=stride % 2",
            ),
        ),
        works="reconstructed_audio.shape == audio.shape",
    ),
    ReportCase(
        name="farm_one_hot_labels_of_a_multi_class_head",
        source="https://github.com/deepset-ai/FARM/issues/100",
        answer="The labels of a multi-class task arrive one-hot, [8, 4], and are flattened to 32: the head needs class numbers.",
        magic="shapes",
        cells=(
            """
            class TextClassificationHead(nn.Module):
                def __init__(self, layer_dims=(768, 4)):
                    super().__init__()
                    self.feed_forward = nn.Linear(*layer_dims)
                    self.loss_fct = nn.CrossEntropyLoss(reduction="none")

                def forward(self, x):
                    return self.feed_forward(x)

                def logits_to_loss(self, logits, label_ids):
                    return self.loss_fct(logits, label_ids.view(-1))  # <- here

            head = TextClassificationHead()
            pooled_output = torch.randn(8, 768)
            label_ids = torch.tensor([[0, 1, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1],
                                      [1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0]])
            """,
            """
            %%shapes -o r
            logits = head(pooled_output)
            loss = head.logits_to_loss(logits, label_ids)
            loss.mean().backward()
            """,
        ),
        op=("cross_entropy",),
        says=("one-hot",),
        fix=r"label_ids\.argmax\((dim=)?(1|-1)\)|label_ids\.float\(\)",
        fixed=(("label_ids.view(-1)", "label_ids.argmax(1)"),),
        works="loss.shape == (8,)",
    ),
    ReportCase(
        name="fcn_with_the_classes_of_another_data_set",
        source="https://github.com/pochih/FCN-pytorch/issues/15",
        answer="The labels have 32 channels, the network was made with n_class = 20: set n_class to the data set's.",
        magic="shapes",
        cells=(
            """
            class FCNs(nn.Module):
                def __init__(self, n_class):
                    super().__init__()
                    self.n_class = n_class
                    self.features = nn.Sequential(
                        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1))
                    self.relu = nn.ReLU(inplace=True)
                    self.deconv1 = nn.ConvTranspose2d(32, 16, kernel_size=3, stride=2, padding=1, dilation=1, output_padding=1)
                    self.bn1 = nn.BatchNorm2d(16)
                    self.deconv2 = nn.ConvTranspose2d(16, 8, kernel_size=3, stride=2, padding=1, dilation=1, output_padding=1)
                    self.bn2 = nn.BatchNorm2d(8)
                    self.classifier = nn.Conv2d(8, n_class, kernel_size=1)

                def forward(self, x):
                    score = self.bn1(self.relu(self.deconv1(self.features(x))))
                    score = self.bn2(self.relu(self.deconv2(score)))
                    return self.classifier(score)

            class CamVidDataset(Dataset):
                def __len__(self):
                    return 4

                def __getitem__(self, idx):
                    img = torch.rand(3, 96, 128)
                    label = torch.randint(0, 32, (96, 128))
                    target = torch.zeros(32, 96, 128)
                    for c in range(32):
                        target[c][label == c] = 1
                    return {'X': img, 'Y': target, 'l': label}

            n_class = 20
            fcn_model = FCNs(n_class=n_class)
            criterion = nn.BCEWithLogitsLoss()
            optimizer = torch.optim.RMSprop(fcn_model.parameters(), lr=1e-4)
            train_loader = DataLoader(CamVidDataset(), batch_size=2, shuffle=True)
            """,
            """
            for iter, batch in enumerate(train_loader):
                optimizer.zero_grad()
                inputs, labels = batch['X'], batch['Y']
                outputs = fcn_model(inputs)
                loss = criterion(outputs, labels)  # <- here
                loss.backward()
                optimizer.step()
            """,
            "%shapes -o r",
        ),
        op=("binary_cross_entropy_with_logits",),
        says=("classifier", "20", "32"),
        fix=r"Conv2d\(8, 32|n_class\s*=\s*32",
        fixed=(("n_class = 20", "n_class = 32"),),
        works="outputs.shape == labels.shape",
    ),
    ReportCase(
        name="word_lstm_cross_entropy_wants_classes_second",
        source="https://github.com/markhliu/DGAI/issues/7",
        answer="The classes must be dimension 1: loss_func(output.transpose(1, 2), targets).",
        magic="shapes",
        cells=(
            """
            class WordLSTM(nn.Module):
                def __init__(self, ntoken, input_size=128, n_embed=128, n_layers=3, drop_prob=0.2):
                    super().__init__()
                    self.n_layers, self.n_embed = n_layers, n_embed
                    self.embedding = nn.Embedding(ntoken, n_embed)
                    self.lstm = nn.LSTM(input_size, hidden_size=n_embed, num_layers=n_layers, dropout=drop_prob, batch_first=True)
                    self.fc = nn.Linear(input_size, ntoken)

                def forward(self, x, hc):
                    embed = self.embedding(x)
                    x, hc = self.lstm(embed, hc)
                    x = self.fc(x)
                    return x, hc

                def init_hidden(self, n_seqs):
                    weight = next(self.parameters()).data
                    return (weight.new(self.n_layers, n_seqs, self.n_embed).zero_(),
                            weight.new(self.n_layers, n_seqs, self.n_embed).zero_())

            seq_len, batch_size, ntoken = 100, 32, 1277
            text = torch.randint(0, ntoken, (6501,))
            xys = [(text[n:n + seq_len], text[n + 1:n + seq_len + 1]) for n in range(0, 6400, 100)]
            loader = DataLoader(xys, batch_size=batch_size, shuffle=True)
            model = WordLSTM(ntoken)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.0001)
            loss_func = nn.CrossEntropyLoss()
            """,
            """
            %%shapes -o r
            model.train()
            sh, sc = model.init_hidden(batch_size)
            for inputs, targets in loader:
                optimizer.zero_grad()
                output, (sh, sc) = model(inputs, (sh, sc))
                loss = loss_func(output, targets)  # <- here
                sh, sc = sh.detach(), sc.detach()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 5)
                optimizer.step()
                break
            """,
        ),
        op=("cross_entropy",),
        fix=r"output\.(transpose\((1, 2|2, 1|1, -1|-1, 1|-2, -1|-1, -2)\)|permute\(0, 2, 1\)|mT|flatten\(0, 1\)|view\(-1, )",
        fixed=(("loss_func(output, targets)", "loss_func(output.transpose(1, 2), targets)"),),
        works="math.isfinite(loss.item())",
    ),
    ReportCase(
        name="coca_captioning_loss_is_right",
        source="https://github.com/lucidrains/CoCa-pytorch/issues/1",
        answer="The rearrangement is needed: cross_entropy takes the classes in dimension 1, so 'b n c -> b c n' is right.",
        magic="shapes",
        healthy=True,
        cells=(
            """
            class CoCa(nn.Module):
                def __init__(self, dim=64, num_tokens=100):
                    super().__init__()
                    self.token_emb = nn.Embedding(num_tokens, dim)
                    self.text_cls_token = nn.Parameter(torch.randn(dim))
                    self.block = nn.TransformerEncoderLayer(dim, 4, 128, batch_first=True)
                    self.to_logits = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, num_tokens, bias=False))
                    self.temperature = nn.Parameter(torch.tensor(1.))
                    self.img = nn.Linear(32, dim)

                def forward(self, text, images):
                    batch = text.shape[0]
                    text, labels = text[:, :-1], text[:, 1:]
                    x = self.token_emb(text)
                    cls = self.text_cls_token.expand(batch, 1, -1)
                    x = self.block(torch.cat((x, cls), dim=-2))
                    text_tokens, text_embeds = x[:, :-1], x[:, -1]
                    logits = self.to_logits(text_tokens)
                    caption_loss = F.cross_entropy(logits.permute(0, 2, 1), labels, ignore_index=0)
                    image_embeds = self.img(images)
                    sim = torch.einsum('i d, j d -> i j', text_embeds, image_embeds) * self.temperature.exp()
                    contrastive_labels = torch.arange(batch)
                    contrastive_loss = (F.cross_entropy(sim, contrastive_labels) + F.cross_entropy(sim.t(), contrastive_labels)) * 0.5
                    return caption_loss * 2 + contrastive_loss

            coca = CoCa()
            text, images = torch.randint(0, 100, (4, 33)), torch.randn(4, 32)
            """,
            """
            %%shapes -o r
            loss = coca(text, images)
            loss.backward()
            """,
        ),
    ),
    ReportCase(
        name="batchformer_attends_over_the_batch_on_purpose",
        source="https://github.com/zhihou7/BatchFormer/issues/29",
        answer="Right as it is: BatchFormer attends along the first dimension, the batch, with the sequence as the layer's batch.",
        magic="shapes",
        healthy=True,
        cells=(
            """
            class BatchFormerV2(nn.Module):
                def __init__(self, dim=64):
                    super().__init__()
                    self.patch = nn.Conv2d(3, dim, 8, 8)
                    self.encoder = nn.TransformerEncoderLayer(dim, 4, dim, 0.5)
                    self.blocks = nn.TransformerEncoderLayer(dim, 4, dim, batch_first=True)
                    self.head = nn.Linear(dim, 10)

                def forward(self, x, y):
                    x = self.patch(x).flatten(2).transpose(1, 2)
                    if self.training:
                        orig_x = x
                        x = self.encoder(x)
                        x = torch.cat([orig_x, x], dim=0)
                        y = torch.cat([y, y], dim=0)
                    return self.head(self.blocks(x).mean(1)), y

            model = BatchFormerV2()
            x, y = torch.randn(6, 3, 32, 32), torch.randint(0, 10, (6,))
            """,
            """
            %%shapes -o r
            logits, y2 = model(x, y)
            loss = F.cross_entropy(logits, y2)
            loss.backward()
            """,
        ),
    ),
    ReportCase(
        name="double_swin_masks_with_a_channel",
        source="https://github.com/HSG-AIML/SSLTransformerRS/issues/1",
        answer="y is [8, 1, 224, 224]; cross_entropy wants [8, 224, 224]: y.squeeze(1).",
        magic="shapes",
        cells=(
            """
            class SegmentationDecoder(nn.Module):
                def __init__(self, out_channels):
                    super().__init__()
                    self.up = nn.Sequential(nn.Conv2d(13, 16, 4, 4), nn.ReLU(),
                                            nn.Upsample(scale_factor=4, mode="bilinear"), nn.Conv2d(16, out_channels, 1))

                def forward(self, x):
                    return self.up(x["s2"])

            model = SegmentationDecoder(8)
            criterion = nn.CrossEntropyLoss(ignore_index=255, reduction="mean")
            data = [{"s2": torch.rand(13, 64, 64), "label": torch.randint(0, 8, (1, 64, 64))} for _ in range(16)]
            train_loader = DataLoader(data, batch_size=8, shuffle=True)
            """,
            """
            %%shapes -o r
            for idx, sample in enumerate(train_loader):
                y = sample["label"].long()
                y_hat = model(sample)
                loss = criterion(y_hat, y)  # <- here
                loss.backward()
            """,
        ),
        op=("cross_entropy",),
        fix=r"y\.squeeze\(1\)|y\[:, 0\]",
        fixed=(("criterion(y_hat, y)", "criterion(y_hat, y.squeeze(1))"),),
        works="math.isfinite(loss.item())",
    ),
    # --- dimensions read in another order ---
    ReportCase(
        name="transformer_from_scratch_heads_merged_without_permute",
        source="https://github.com/jsbaan/transformer-from-scratch/pull/6",
        answer="values is (batch, heads, seq_len, qkv_dim): permute(0, 2, 1, 3) before the reshape, or tokens are mixed.",
        magic="shapes",
        cells=(
            """
            class MultiHeadAttention(nn.Module):
                def __init__(self, hidden_dim, num_heads):
                    super().__init__()
                    self.num_heads = num_heads
                    self.qkv_dim = hidden_dim // num_heads
                    self.qkv_proj = nn.Linear(hidden_dim, 3 * num_heads * self.qkv_dim, bias=False)
                    self.o_proj = nn.Linear(num_heads * self.qkv_dim, hidden_dim, bias=False)

                def forward(self, x):
                    batch_size, sequence_length, hidden_dim = x.size()
                    qkv = self.qkv_proj(x)
                    qkv = qkv.reshape(batch_size, sequence_length, self.num_heads, 3 * self.qkv_dim)
                    qkv = qkv.permute(0, 2, 1, 3)
                    q, k, v = qkv.chunk(3, dim=-1)
                    values, attn = self.scaled_dot_product(q, k, v)
                    values = values.reshape(batch_size, sequence_length, hidden_dim)  # <- here
                    return self.o_proj(values)

                def scaled_dot_product(self, q, k, v):
                    attn_logits = torch.matmul(q, torch.transpose(k, -2, -1)) / math.sqrt(q.shape[-1])
                    attention = F.softmax(attn_logits, dim=-1)
                    return torch.matmul(attention, v), attention

            class EncoderBlock(nn.Module):
                def __init__(self, hidden_dim, ff_dim, num_heads):
                    super().__init__()
                    self.self_mha = MultiHeadAttention(hidden_dim, num_heads)
                    self.feed_forward = nn.Sequential(nn.Linear(hidden_dim, ff_dim), nn.ReLU(), nn.Linear(ff_dim, hidden_dim))
                    self.layer_norm1 = nn.LayerNorm(hidden_dim)
                    self.layer_norm2 = nn.LayerNorm(hidden_dim)

                def forward(self, x):
                    x = self.layer_norm1(x + self.self_mha(x))
                    return self.layer_norm2(x + self.feed_forward(x))

            class TransformerEncoder(nn.Module):
                def __init__(self, vocab, hidden_dim=512, ff_dim=2048, num_heads=8, num_layers=2):
                    super().__init__()
                    self.embed = nn.Embedding(vocab, hidden_dim)
                    self.encoder_blocks = nn.ModuleList([EncoderBlock(hidden_dim, ff_dim, num_heads) for _ in range(num_layers)])

                def forward(self, input_ids):
                    x = self.embed(input_ids) * math.sqrt(512)
                    for encoder_block in self.encoder_blocks:
                        x = encoder_block(x)
                    return x

            encoder = TransformerEncoder(vocab=128)
            input_ids = torch.randint(0, 128, (4, 20))
            """,
            """
            %%shapes -o r
            out = encoder(input_ids)
            """,
        ),
        op=("reshape",),
        module=("encoder_blocks.0.self_mha",),
        says=("4 x 8 x 20 x 64",),
        fix=r"values\.(permute\(0, 2, 1, 3\)|transpose\((1, 2|2, 1|-3, -2)\))\.(contiguous\(\)\.)?(reshape|view|flatten)",
        fixed=(("values = values.reshape(", "values = values.transpose(1, 2).reshape("),),
        works="out.shape == (4, 20, 512)",
    ),
    ReportCase(
        name="conv2_1d_folds_time_into_the_batch_without_permute",
        source="https://github.com/proceduralia/pytorch-conv2_1d/issues/1",
        answer="x is (b, c, t, d1, d2): permute(0, 2, 1, 3, 4) before view(b*t, c, d1, d2).",
        magic="shapes",
        cells=(
            """
            class Conv2_1d(nn.Module):
                def __init__(self, in_channels, out_channels, kernel_size=3, padding=1):
                    super().__init__()
                    self.out_channels = out_channels
                    self.conv2d = nn.Conv2d(in_channels, 24, kernel_size, padding=padding)
                    self.conv1d = nn.Conv1d(24, out_channels, kernel_size, padding=padding)

                def forward(self, x):
                    b, c, t, d1, d2 = x.size()
                    x = x.view(b*t, c, d1, d2)  # <- here
                    x = self.conv2d(x)
                    dr1, dr2 = x.size(2), x.size(3)
                    x = x.view(b*dr1*dr2, x.size(1), t)
                    x = self.conv1d(x)
                    x = x.view(b, self.out_channels, -1, dr1, dr2)
                    return x

            net = Conv2_1d(3, 8)
            video = torch.rand(2, 3, 16, 28, 30)
            """,
            "%shapes -o r net video",
        ),
        op=("view",),
        says=("2 x 3 x 16 x 28 x 30",),
        fix=r"x\.(permute\(0, 2, 1, 3, 4\)|transpose\((1, 2|2, 1)\))\.(contiguous\(\)\.view|reshape|flatten)",
        fixed=(
            ("x = x.view(b*t, c, d1, d2)", "x = x.permute(0, 2, 1, 3, 4).reshape(b*t, c, d1, d2)"),
            ("x = x.view(b*dr1*dr2, x.size(1), t)", "x = x.view(b, t, -1, dr1, dr2).permute(0, 3, 4, 2, 1).reshape(b*dr1*dr2, -1, t)"),
            ("x = x.view(b, self.out_channels, -1, dr1, dr2)", "x = x.view(b, dr1, dr2, self.out_channels, -1).permute(0, 3, 4, 1, 2)"),
        ),
        works="net(video).shape == (2, 8, 16, 28, 30)",
    ),
    ReportCase(
        name="fuxictr_heads_split_without_transpose",
        source="https://github.com/reczoo/FuxiCTR/issues/30",
        answer="view(batch_size * num_heads, -1, attention_dim) mixes fields: view(batch, seq, heads, dim).transpose(1, 2).",
        magic="shapes",
        cells=(
            """
            class MultiHeadAttention(nn.Module):
                def __init__(self, input_dim, attention_dim=32, num_heads=4):
                    super().__init__()
                    self.attention_dim, self.num_heads = attention_dim, num_heads
                    self.output_dim = num_heads * attention_dim
                    self.W_q = nn.Linear(input_dim, self.output_dim, bias=False)
                    self.W_k = nn.Linear(input_dim, self.output_dim, bias=False)
                    self.W_v = nn.Linear(input_dim, self.output_dim, bias=False)

                def forward(self, query, key, value):
                    query = self.W_q(query)
                    key = self.W_k(key)
                    value = self.W_v(value)
                    batch_size = query.size(0)
                    query = query.view(batch_size * self.num_heads, -1, self.attention_dim)  # <- here
                    key = key.view(batch_size * self.num_heads, -1, self.attention_dim)  # <- here
                    value = value.view(batch_size * self.num_heads, -1, self.attention_dim)  # <- here
                    scores = torch.bmm(query, key.transpose(1, 2)) / self.attention_dim ** 0.5
                    output = torch.bmm(scores.softmax(-1), value)
                    output = output.view(batch_size, -1, self.output_dim)
                    return output.relu()

            class AutoInt(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.embedding_layer = nn.Embedding(1000, 40)
                    self.self_attention = MultiHeadAttention(40)
                    self.fc = nn.Linear(14 * 128, 1)

                def forward(self, X):
                    feature_emb = self.embedding_layer(X)
                    attention_out = self.self_attention(feature_emb, feature_emb, feature_emb)
                    return torch.flatten(attention_out, start_dim=1) @ self.fc.weight.T + self.fc.bias

            model = AutoInt()
            X = torch.randint(0, 1000, (10, 14))
            """,
            """
            %%shapes -o r
            y_pred = model(X)
            """,
        ),
        op=("view",),
        module=("self_attention",),
        says=("10 x 14 x 128",),
        fix=r"\.view\(.*4.*32\)\.transpose\(1, 2\)|transpose\(1, 2\)|permute\(0, 2, 1, 3\)",
        fixed=(
            (
                "query = query.view(batch_size * self.num_heads, -1, self.attention_dim)",
                "query = query.view(batch_size, -1, self.num_heads, self.attention_dim).transpose(1, 2)",
            ),
            (
                "key = key.view(batch_size * self.num_heads, -1, self.attention_dim)",
                "key = key.view(batch_size, -1, self.num_heads, self.attention_dim).transpose(1, 2)",
            ),
            (
                "value = value.view(batch_size * self.num_heads, -1, self.attention_dim)",
                "value = value.view(batch_size, -1, self.num_heads, self.attention_dim).transpose(1, 2)",
            ),
            ("torch.bmm(query, key.transpose(1, 2))", "torch.matmul(query, key.transpose(-2, -1))"),
            ("torch.bmm(scores.softmax(-1), value)", "torch.matmul(scores.softmax(-1), value).transpose(1, 2)"),
            ("output.view(batch_size, -1, self.output_dim)", "output.reshape(batch_size, -1, self.output_dim)"),
        ),
        works="y_pred.shape == (10, 1)",
    ),
    # --- a batch that cannot be put together ---
    ReportCase(
        name="ssd_without_its_collate_function",
        source="https://github.com/amdegroot/ssd.pytorch/issues/546",
        answer="Each picture has another number of boxes: collate_fn=detection_collate keeps the targets in a list.",
        magic="shapes",
        cells=(
            """
            def detection_collate(batch):
                targets = []
                imgs = []
                for sample in batch:
                    imgs.append(sample[0])
                    targets.append(torch.FloatTensor(sample[1]))
                return torch.stack(imgs, 0), targets

            class VOCDetection(Dataset):
                boxes = [1, 2, 2, 3]

                def __getitem__(self, index):
                    im, gt = self.pull_item(index)
                    return im, gt

                def __len__(self):
                    return len(self.boxes)

                def pull_item(self, index):
                    img = np.random.rand(300, 300, 3).astype(np.float32)
                    target = np.random.rand(self.boxes[index], 5)
                    return torch.from_numpy(img).permute(2, 0, 1), target

            dataset = VOCDetection()
            data_loader = DataLoader(dataset, batch_size=2)
            """,
            """
            %%shapes -o r
            batch_iterator = iter(data_loader)
            images, targets = next(batch_iterator)  # <- here
            """,
        ),
        op=("stack",),
        says=("1 x 5", "2 x 5", r"\[1\]|second|item 1|sample\[1\]"),
        fix="collate_fn",
        fixed=(("batch_size=2)", "batch_size=2, collate_fn=detection_collate)"),),
        works="len(targets) == 2 and images.shape == (2, 3, 300, 300)",
    ),
    ReportCase(
        name="captcha_targets_of_unequal_length",
        source="https://github.com/abhishekkrthakur/captcha-recognition-pytorch/issues/1",
        answer="The captchas have 7 and 6 characters: pad the targets to one length.",
        magic="shapes",
        cells=(
            """
            class ClassificationDataset:
                def __init__(self, images, targets):
                    self.images = images
                    self.targets = targets

                def __len__(self):
                    return len(self.targets)

                def __getitem__(self, item):
                    image = self.images[item]
                    targets = self.targets[item]
                    return {
                        "images": torch.tensor(image, dtype=torch.float),
                        "targets": torch.tensor(targets, dtype=torch.long),
                    }

            words = ["a7k2m9x", "b3n8p4", "c5q1r6t", "d2w9z3", "e4h7j8y", "f6g5v1u", "k2m9x4", "n8p4q7s"]
            targets = [[ord(c) for c in word] for word in words]
            images = [np.random.rand(3, 75, 300) for _ in words]
            train_dataset = ClassificationDataset(images, targets)
            train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=8, shuffle=False)
            """,
            """
            def train_fn(data_loader):
                for data in data_loader:  # <- here
                    for key, value in data.items():
                        data[key] = value.to("cpu")
                return data

            data = train_fn(train_loader)
            """,
            "%shapes -o r",
        ),
        op=("stack",),
        says=("targets", r"\b7\b", r"\b6\b"),
        fix=r"pad",
        fixed=(
            (
                '"targets": torch.tensor(targets, dtype=torch.long)',
                '"targets": F.pad(torch.tensor(targets, dtype=torch.long), (0, 7 - len(targets)))',
            ),
        ),
        works="data['targets'].shape == (8, 7)",
    ),
    # --- a forward that fails ---
    ReportCase(
        name="sentiment_rnn_last_batch_is_smaller",
        source="https://github.com/udacity/deep-learning-v2-pytorch/pull/398",
        answer="The number of reviews is no multiple of 64, the last batch has 4: drop_last=True (or init_hidden of the batch's own size).",
        magic="shapes",
        cells=(
            """
            class SentimentRNN(nn.Module):
                def __init__(self, vocab_size, output_size, embedding_dim, hidden_dim, n_layers, drop_prob=0.5):
                    super().__init__()
                    self.output_size, self.n_layers, self.hidden_dim = output_size, n_layers, hidden_dim
                    self.embedding = nn.Embedding(vocab_size, embedding_dim)
                    self.lstm = nn.LSTM(embedding_dim, hidden_dim, n_layers, dropout=drop_prob, batch_first=True)
                    self.dropout = nn.Dropout(0.3)
                    self.fc = nn.Linear(hidden_dim, output_size)
                    self.sig = nn.Sigmoid()

                def forward(self, x, hidden):
                    batch_size = x.size(0)
                    embeds = self.embedding(x)
                    lstm_out, hidden = self.lstm(embeds, hidden)  # <- here
                    out = self.fc(self.dropout(lstm_out))
                    sig_out = self.sig(out)
                    sig_out = sig_out.view(batch_size, -1)
                    sig_out = sig_out[:, -1]
                    return sig_out, hidden

                def init_hidden(self, batch_size):
                    weight = next(self.parameters()).data
                    return (weight.new(self.n_layers, batch_size, self.hidden_dim).zero_(),
                            weight.new(self.n_layers, batch_size, self.hidden_dim).zero_())

            batch_size = 64
            valid_data = TensorDataset(torch.randint(1, 5000, (132, 50)), torch.randint(0, 2, (132,)))
            valid_loader = DataLoader(valid_data, shuffle=True, batch_size=batch_size)
            net = SentimentRNN(5000, 1, 400, 256, 2)
            criterion = nn.BCELoss()
            """,
            """
            %%shapes -o r
            val_h = net.init_hidden(batch_size)
            val_losses = []
            net.eval()
            for inputs, labels in valid_loader:
                val_h = tuple([each.data for each in val_h])
                output, val_h = net(inputs, val_h)  # <- here
                val_loss = criterion(output.squeeze(), labels.float())
                val_losses.append(val_loss.item())
            """,
        ),
        module=("lstm",),
        fix=r"drop_last=True|init_hidden\((inputs|x)\.(size\(0\)|shape\[0\])\)|(size\(0\)|shape\[0\])",
        fixed=(("batch_size=batch_size)", "batch_size=batch_size, drop_last=True)"),),
        works="len(val_losses) == 2",
    ),
    ReportCase(
        name="nested_unet_of_700_pixels",
        source="https://github.com/bigmb/Unet-Segmentation-Pytorch-Nest-of-Unets/issues/52",
        answer="Four poolings halve the size: it must be divisible by 16 (700 is not), e.g. 400 or 800.",
        magic="shapes",
        cells=(
            """
            class conv_block(nn.Module):
                def __init__(self, in_ch, out_ch):
                    super().__init__()
                    self.conv = nn.Sequential(
                        nn.Conv2d(in_ch, out_ch, kernel_size=3, stride=1, padding=1, bias=True),
                        nn.BatchNorm2d(out_ch), nn.ReLU(inplace=True))

                def forward(self, x):
                    return self.conv(x)

            class up_conv(nn.Module):
                def __init__(self, in_ch, out_ch):
                    super().__init__()
                    self.up = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(in_ch, out_ch, 3, padding=1),
                                            nn.BatchNorm2d(out_ch), nn.ReLU())

                def forward(self, x):
                    return self.up(x)

            class U_Net(nn.Module):
                def __init__(self, in_ch=3, out_ch=1):
                    super().__init__()
                    filters = [4, 8, 16, 32, 64]
                    self.Maxpool1 = nn.MaxPool2d(kernel_size=2, stride=2)
                    self.Maxpool2 = nn.MaxPool2d(kernel_size=2, stride=2)
                    self.Maxpool3 = nn.MaxPool2d(kernel_size=2, stride=2)
                    self.Maxpool4 = nn.MaxPool2d(kernel_size=2, stride=2)
                    self.Conv1, self.Conv2 = conv_block(in_ch, filters[0]), conv_block(filters[0], filters[1])
                    self.Conv3, self.Conv4 = conv_block(filters[1], filters[2]), conv_block(filters[2], filters[3])
                    self.Conv5 = conv_block(filters[3], filters[4])
                    self.Up5, self.Up_conv5 = up_conv(filters[4], filters[3]), conv_block(filters[4], filters[3])
                    self.Up4, self.Up_conv4 = up_conv(filters[3], filters[2]), conv_block(filters[3], filters[2])
                    self.Up3, self.Up_conv3 = up_conv(filters[2], filters[1]), conv_block(filters[2], filters[1])
                    self.Up2, self.Up_conv2 = up_conv(filters[1], filters[0]), conv_block(filters[1], filters[0])
                    self.Conv = nn.Conv2d(filters[0], out_ch, kernel_size=1)

                def forward(self, x):
                    e1 = self.Conv1(x)
                    e2 = self.Conv2(self.Maxpool1(e1))
                    e3 = self.Conv3(self.Maxpool2(e2))
                    e4 = self.Conv4(self.Maxpool3(e3))
                    e5 = self.Conv5(self.Maxpool4(e4))
                    d5 = self.Up5(e5)
                    d5 = torch.cat((e4, d5), dim=1)  # <- here
                    d5 = self.Up_conv5(d5)
                    d4 = self.Up_conv4(torch.cat((e3, self.Up4(d5)), dim=1))
                    d3 = self.Up_conv3(torch.cat((e2, self.Up3(d4)), dim=1))
                    d2 = self.Up_conv2(torch.cat((e1, self.Up2(d3)), dim=1))
                    return self.Conv(d2)

            model = U_Net(3, 1)
            x = torch.rand(1, 3, 700, 700)
            """,
            "%shapes -o r model x",
        ),
        op=("cat",),
        says=("87", "86"),
        fix=r"multiple of 16|704|688|800|400|pad|interpolate",
        fixed=(("x = torch.rand(1, 3, 700, 700)", "x = F.pad(torch.rand(1, 3, 700, 700), (0, 4, 0, 4))"),),
        works="model(x).shape == (1, 1, 704, 704)",
    ),
    ReportCase(
        name="image_segmentation_channels_last",
        source="https://github.com/LeeJunHyun/Image_Segmentation/issues/29",
        answer="The data is [1, 512, 512, 3]: transpose it to [1, 3, 512, 512].",
        magic="shapes",
        cells=(
            """
            class conv_block(nn.Module):
                def __init__(self, ch_in, ch_out):
                    super().__init__()
                    self.conv = nn.Sequential(
                        nn.Conv2d(ch_in, ch_out, kernel_size=3, stride=1, padding=1, bias=True),
                        nn.BatchNorm2d(ch_out),
                        nn.ReLU(inplace=True),
                    )

                def forward(self, x):
                    x = self.conv(x)  # <- here
                    return x

            class U_Net(nn.Module):
                def __init__(self, img_ch=3, output_ch=1):
                    super().__init__()
                    self.Maxpool = nn.MaxPool2d(kernel_size=2, stride=2)
                    self.Conv1 = conv_block(img_ch, 8)
                    self.Conv2 = conv_block(8, 16)
                    self.Up2 = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(16, 8, kernel_size=3, padding=1), nn.ReLU(inplace=True))
                    self.Up_conv2 = conv_block(16, 8)
                    self.Conv_1x1 = nn.Conv2d(8, output_ch, kernel_size=1)

                def forward(self, x):
                    x1 = self.Conv1(x)  # <- here
                    x2 = self.Conv2(self.Maxpool(x1))
                    d2 = self.Up2(x2)
                    d2 = self.Up_conv2(torch.cat((x1, d2), dim=1))
                    return self.Conv_1x1(d2)

            unet = U_Net()
            image = (np.random.rand(512, 512, 3) * 255).astype(np.uint8)
            images = torch.from_numpy(image).float().div(255).unsqueeze(0)
            GT = torch.randint(0, 2, (1, 1, 512, 512)).float()
            criterion = nn.BCELoss()
            """,
            """
            %%shapes -o r
            SR = unet(images)  # <- here
            SR_probs = torch.sigmoid(SR)
            loss = criterion(SR_probs.view(SR_probs.size(0), -1), GT.view(GT.size(0), -1))
            """,
        ),
        op=("conv2d",),
        module=("Conv1.conv.0",),
        fix=r"images\.permute\(0, 3, 1, 2\)|movedim",
        fixed=(("SR = unet(images)", "SR = unet(images.permute(0, 3, 1, 2))"),),
        works="SR.shape == GT.shape",
    ),
    ReportCase(
        name="influenza_positional_encoder_batch_first",
        source="https://github.com/KasperGroesLudvigsen/influenza_transformer/issues/9",
        answer="pe is [max_len, 1, d_model], x is [batch, seq, d_model]: with batch_first the encoding must be [1, seq, d_model].",
        magic="shapes",
        cells=(
            """
            class PositionalEncoder(nn.Module):
                def __init__(self, dropout=0.1, max_seq_len=5000, d_model=512, batch_first=False):
                    super().__init__()
                    self.d_model = d_model
                    self.dropout = nn.Dropout(p=dropout)
                    self.batch_first = batch_first
                    self.x_dim = 1 if batch_first else 0
                    position = torch.arange(max_seq_len).unsqueeze(1)
                    div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
                    pe = torch.zeros(max_seq_len, 1, d_model)
                    pe[:, 0, 0::2] = torch.sin(position * div_term)
                    pe[:, 0, 1::2] = torch.cos(position * div_term)
                    self.register_buffer('pe', pe)

                def forward(self, x):
                    x = x + self.pe[:x.size(self.x_dim)]  # <- here
                    return self.dropout(x)

            pos_encoder = PositionalEncoder(batch_first=True)
            src = torch.randn(32, 153, 512)
            """,
            """
            %%shapes -o r
            out = pos_encoder(src)
            """,
        ),
        op=("add", "__add__"),
        says=("153 x 1 x 512",),
        fix=r"transpose\(0, 1\)|permute\(1, 0, 2\)|squeeze\(1\)|swapaxes|\[:, :|1, 5000",
        fixed=(("self.pe[:x.size(self.x_dim)]", "self.pe[:x.size(self.x_dim)].transpose(0, 1)"),),
        works="out.shape == src.shape",
    ),
    ReportCase(
        name="person_reid_checkpoint_of_other_classes",
        source="https://github.com/layumi/Person_reID_baseline_pytorch/issues/103",
        answer="The checkpoint was trained on 156 classes, test.py makes ft_net(751): change 751 to 156.",
        magic="shapes",
        cells=(
            """
            class ClassBlock(nn.Module):
                def __init__(self, input_dim, class_num, num_bottleneck=512):
                    super().__init__()
                    self.add_block = nn.Sequential(nn.Linear(input_dim, num_bottleneck), nn.BatchNorm1d(num_bottleneck), nn.LeakyReLU(0.1))
                    self.classifier = nn.Sequential(nn.Linear(num_bottleneck, class_num))

                def forward(self, x):
                    return self.classifier(self.add_block(x))

            class ft_net(nn.Module):
                def __init__(self, class_num):
                    super().__init__()
                    self.model = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten())
                    self.classifier = ClassBlock(64, class_num)

                def forward(self, x):
                    return self.classifier(self.model(x))

            torch.save(ft_net(156).state_dict(), "net_last.pth")
            """,
            """
            %%shapes -o r
            def load_network(network):
                network.load_state_dict(torch.load("net_last.pth"))  # <- here
                return network

            model_structure = ft_net(751)  # <- here
            model = load_network(model_structure)  # <- here
            """,
        ),
        says=(r"classifier\.classifier\.0", "751"),
        fix=r"\b156\b",
        fixed=(("ft_net(751)", "ft_net(156)"),),
        works="model.classifier.classifier[0].out_features == 156",
    ),
    ReportCase(
        name="lstm_cell_needs_two_states",
        source="https://github.com/salesforce/awd-lstm-lm/issues/95",
        answer="An LSTMCell takes its states as a tuple (h, c), unlike a GRUCell.",
        magic="shapes",
        cells=(
            """
            lstm = nn.LSTMCell(256, 512)
            x = torch.randn(1, 256)
            h = torch.randn(1, 512)
            """,
            """
            %%shapes -o r
            print('Testing WeightDrop with LSTM')
            run1 = [out.sum() for out in lstm(x, h)]  # <- here
            """,
        ),
        says=("tuple|pair|two tensors",),
        fix=r"\(h, (c|h|torch\.zeros_like\(h\))\)|lstm\(x\)",
        fixed=(("lstm(x, h)", "lstm(x, (h, torch.zeros_like(h)))"),),
        works="len(run1) == 2",
    ),
)
