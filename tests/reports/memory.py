"""Memory that grows, or is not given back: what people asked, and what it was."""

from __future__ import annotations

from tests.reports.case import ReportCase

CASES: tuple[ReportCase, ...] = (
    ReportCase(
        name="lstm-hidden-state",
        source="https://github.com/pytorch/pytorch/issues/2198",
        answer="The hidden state is passed on with its history, so nothing of the graph is ever freed: detach it.",
        magic="memtrace",
        cells=(
            """
            input_size, hidden_size, batch_size = 64, 128, 32
            rnn = nn.LSTM(input_size, hidden_size)
            hidden = (torch.zeros(1, batch_size, hidden_size), torch.zeros(1, batch_size, hidden_size))
            """,
            """
            %%memtrace -o r
            for i in range(60):
                x = torch.rand(1, batch_size, input_size)
                out, hidden = rnn(x, hidden)  # <- here
            """,
        ),
        says=("hidden", "graph"),
        never=(r"hidden = hidden\.detach\(\)",),  # it is a tuple
        fix="detach|no_grad",
        fixed=(("out, hidden = rnn(x, hidden)", "out, hidden = rnn(x, hidden); hidden = tuple(h.detach() for h in hidden)"),),
        works="hidden[0].grad_fn is None",
    ),
    ReportCase(
        name="function-keeps-its-output-on-ctx",
        source="https://github.com/pytorch/pytorch/issues/5569",
        answer="The output refers to its node, and the node's ctx to the output, a cycle: use save_for_backward for inputs and outputs.",
        magic="memtrace",
        cells=(
            """
            class CopyFunction(torch.autograd.Function):
                @staticmethod
                def forward(ctx, input_features, weight):
                    ctx.output_features = input_features.clone()  # <- here
                    return ctx.output_features  # <- here
                @staticmethod
                def backward(ctx, grad_output):
                    print('backward is never called; that is OK.')
            """,
            """
            %%memtrace -o r
            for _ in range(100):
                weight = torch.nn.Parameter(torch.Tensor(100, 100).normal_())
                input = torch.FloatTensor(100, 100).uniform_()
                output = CopyFunction.apply(input, weight)  # <- here
                print(output.shape, output.type())
            """,
        ),
        says=("cycle|refer to each other|holds itself", "output_features|ctx|CopyFunction"),
        fix="save_for_backward",
        fixed=(
            (
                "ctx.output_features = input_features.clone()",
                "output_features = input_features.clone(); ctx.save_for_backward(output_features)",
            ),
            ("return ctx.output_features", "return output_features"),
        ),
        works="output.requires_grad",
    ),
    ReportCase(
        name="hook-that-closes-over-its-module",
        source="https://github.com/pytorch/pytorch/issues/46386",
        answer="The hook's closure holds the module that holds the hook: a cycle that only the collector frees.",
        magic="memtrace",
        cells=(
            """
            class LeakyModule(nn.Module):
                def __init__(self):
                    super(LeakyModule, self).__init__()
                    self.resnet = nn.Sequential(nn.Conv2d(3, 64, 7, stride=2), nn.BatchNorm2d(64), nn.ReLU(),
                                                nn.Conv2d(64, 256, 3), nn.Conv2d(256, 256, 3))

                    def fw_hook(m, m_in, m_out):  # <- here
                        self(m_in)  # <- here

                    self.register_forward_hook(fw_hook)  # <- here
            """,
            """
            %%memtrace -o r
            for i in range(10):
                net = LeakyModule()
                net.to('cpu')
                print(f"iteration {i}")
            """,
        ),
        says=("cycle|refer to each other|holds itself", "hook"),
        fix="weakref|remove",
        fixed=(
            ("super(LeakyModule, self).__init__()", "super(LeakyModule, self).__init__(); import weakref; this = weakref.ref(self)"),
            ("self(m_in)", "this()(m_in)"),
        ),
        works="len(net._forward_hooks) == 1",
    ),
    ReportCase(
        name="hooks-of-extractors-that-are-gone",
        source="https://github.com/KamitaniLab/bdpy/issues/72",
        answer="The hooks of each reconstruction outlive it on the encoder, and go on collecting features: remove them by their handles.",
        magic="memtrace",
        cells=(
            """
            class FeatureExtractorHandle(object):
                def __init__(self):
                    self.outputs = []

                def __call__(self, module, module_in, module_out):
                    self.outputs.append(module_out)  # <- here

                def clear(self):
                    self.outputs = []

            class FeatureExtractor(object):
                def __init__(self, encoder, layers, detach=True):
                    self._encoder, self._detach = encoder, detach
                    self._extractor = {}
                    for layer in layers:
                        handle = FeatureExtractorHandle()
                        dict(encoder.named_modules())[layer].register_forward_hook(handle)  # <- here
                        self._extractor[layer] = handle

                def run(self, x):
                    for handle in self._extractor.values():
                        handle.clear()
                    self._encoder.forward(x)
                    features = {layer: handle.outputs[0] for layer, handle in self._extractor.items()}
                    return {layer: f.detach().numpy() for layer, f in features.items()} if self._detach else features
            """,
            """
            def reconstruct(features, encoder, generator, layers, n_iter=8):
                feature_extractor = FeatureExtractor(encoder, layers, detach=False)  # <- here
                latent = torch.randn(1, 16, requires_grad=True)
                opt = torch.optim.SGD([latent], lr=0.1)
                for t in range(n_iter):
                    opt.zero_grad()
                    image = generator(latent).view(1, 3, 32, 32)
                    found = feature_extractor.run(image)
                    loss = sum(((found[layer] - features[layer]) ** 2).sum() for layer in layers)
                    loss.backward()
                    opt.step()
                return image.detach()
            """,
            """
            encoder = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
            generator = nn.Linear(16, 3 * 32 * 32)
            layers = ['0', '2']
            features = {layer: torch.randn(1, 16, 32, 32) for layer in layers}
            """,
            """
            %%memtrace -o r
            for i in range(8):
                image = reconstruct(features, encoder, generator, layers)
            """,
        ),
        says=("hook",),
        fix=r"\.remove\(\)",
        fixed=(
            (
                "dict(encoder.named_modules())[layer].register_forward_hook(handle)",
                "self._handles.append(dict(encoder.named_modules())[layer].register_forward_hook(handle))",
            ),
            ("self._extractor = {}", "self._extractor = {}; self._handles = []"),
            ("return image.detach()", "[h.remove() for h in feature_extractor._handles]; return image.detach()"),
        ),
        works="not encoder[0]._forward_hooks",
    ),
    ReportCase(
        name="trainer-adds-up-losses",
        source="https://github.com/huggingface/transformers/pull/6999",
        answer="tr_loss adds up losses that still have their graphs: return loss.detach() from the training step.",
        magic="memtrace",
        cells=(
            """
            class Classifier(nn.Module):
                def __init__(self, vocab=1000, dim=64, labels=3):
                    super().__init__()
                    self.embeddings = nn.Embedding(vocab, dim)
                    self.encoder = nn.TransformerEncoderLayer(dim, 4, 128, batch_first=True)
                    self.classifier = nn.Linear(dim, labels)

                def forward(self, input_ids, labels):
                    logits = self.classifier(self.encoder(self.embeddings(input_ids))[:, 0])
                    return F.cross_entropy(logits, labels), logits
            """,
            """
            class Trainer:
                def __init__(self, model, train_dataset, num_train_epochs=2, batch_size=8, max_grad_norm=1.0):
                    self.model, self.train_dataset, self.num_train_epochs = model, train_dataset, num_train_epochs
                    self.batch_size, self.max_grad_norm = batch_size, max_grad_norm
                    self.global_step, self.log_history = 0, []

                def training_step(self, model, inputs):
                    model.train()
                    outputs = model(**inputs)
                    loss = outputs[0]
                    loss.backward()
                    return loss  # <- here

                def train(self):
                    optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-5)
                    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
                    tr_loss = torch.tensor(0.0)
                    self.model.zero_grad()
                    for epoch in range(self.num_train_epochs):
                        for step, (input_ids, labels) in enumerate(DataLoader(self.train_dataset, self.batch_size, shuffle=True)):
                            tr_loss += self.training_step(self.model, {"input_ids": input_ids, "labels": labels})  # <- here
                            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
                            optimizer.step()
                            scheduler.step()
                            self.model.zero_grad()
                            self.global_step += 1
                    return tr_loss / self.global_step
            """,
            """
            train_dataset = TensorDataset(torch.randint(1000, (320, 16)), torch.randint(3, (320,)))
            trainer = Trainer(Classifier(), train_dataset)
            """,
            """
            %%memtrace -o r
            loss = trainer.train()
            """,
        ),
        says=("tr_loss", "graph"),
        fix=r"\.detach\(\)|\.item\(\)|float\(",
        fixed=(("return loss  # <- here", "return loss.detach()"),),
        works="not loss.requires_grad and bool(torch.isfinite(loss))",
    ),
    ReportCase(
        name="moving-average-of-losses",
        source="https://github.com/alexhernandezgarcia/gflownet/pull/133",
        answer="The averages are computed with losses that have a graph, which grows with every iteration: compute them with numbers.",
        magic="memtrace",
        cells=(
            """
            class Agent:
                def __init__(self, n_train_steps=60, ema_alpha=0.5, early_stopping=1e-6):
                    self.model = nn.Sequential(nn.Linear(40, 128), nn.LeakyReLU(), nn.Linear(128, 128), nn.LeakyReLU(), nn.Linear(128, 5))
                    self.opt = torch.optim.Adam(self.model.parameters(), 1e-4)
                    self.n_train_steps, self.ema_alpha, self.early_stopping = n_train_steps, ema_alpha, early_stopping

                def flowmatch_loss(self, batch):
                    states, flows, done = batch
                    inflow = torch.logsumexp(self.model(states), 1)
                    gap = (inflow - flows) ** 2
                    term_loss = (gap * done).sum() / (done.sum() + 1e-20)
                    flow_loss = (gap * (1 - done)).sum() / ((1 - done).sum() + 1e-20)
                    return gap.mean(), term_loss, flow_loss

                def sample_batch(self, n=100):
                    return torch.rand(n, 40), torch.rand(n), (torch.rand(n) > 0.5).float()

                def train(self):
                    loss_term_ema = loss_flow_ema = None
                    for it in range(self.n_train_steps):
                        losses = self.flowmatch_loss(self.sample_batch())
                        losses[0].backward()
                        self.opt.step()
                        self.opt.zero_grad()
                        if loss_term_ema and loss_flow_ema:
                            loss_term_ema = self.ema_alpha * losses[1] + (1.0 - self.ema_alpha) * loss_term_ema  # <- here
                            loss_flow_ema = self.ema_alpha * losses[2] + (1.0 - self.ema_alpha) * loss_flow_ema  # <- here
                            if loss_term_ema < self.early_stopping and loss_flow_ema < self.early_stopping:
                                break
                        else:
                            loss_term_ema = losses[1]
                            loss_flow_ema = losses[2]
                    return loss_term_ema, loss_flow_ema
            """,
            "agent = Agent()",
            """
            %%memtrace -o r
            loss_term_ema, loss_flow_ema = agent.train()
            """,
        ),
        says=("loss_(term|flow)_ema", "graph"),
        never=(r"ema \+= ",),  # that would be another average
        fix=r"\.detach\(\)|\.item\(\)|float\(",
        fixed=(("losses[1]", "losses[1].item()"), ("losses[2]", "losses[2].item()")),
        works="isinstance(loss_term_ema, float)",
    ),
    ReportCase(
        name="batch-norm-by-hand",
        source="https://github.com/pytorch/pytorch/issues/20275",
        answer="The update of running_mean extends the graph with every batch: detach what it is computed of, or use no_grad.",
        magic="memtrace",
        cells=(
            """
            class MyBatchNorm2d(nn.BatchNorm2d):
                def forward(self, input):
                    self._check_input_dim(input)
                    momentum = 0.0
                    if self.training and self.track_running_stats:
                        if self.num_batches_tracked is not None:
                            self.num_batches_tracked += 1
                            momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
                    if self.training:
                        mean = input.mean([0, 2, 3])
                        var = input.var([0, 2, 3], unbiased=False)
                        n = input.numel() / input.size(1)
                        self.running_mean = momentum * mean + (1 - momentum) * self.running_mean  # <- here
                        self.running_var = momentum * var * n / (n - 1) + (1 - momentum) * self.running_var  # <- here
                    else:
                        mean, var = self.running_mean, self.running_var
                    input = (input - mean[None, :, None, None]) / (torch.sqrt(var[None, :, None, None] + self.eps))
                    if self.affine:
                        input = input * self.weight[None, :, None, None] + self.bias[None, :, None, None]
                    return input
            """,
            """
            class MyModel(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.conv = nn.Conv2d(3, 16, 3, padding=1)
                    self.bn = MyBatchNorm2d(16)
                    self.fc = nn.Linear(16, 10)

                def forward(self, x):
                    return self.fc(F.relu(self.bn(self.conv(x))).mean([2, 3]))

            model = MyModel()
            criterion = nn.CrossEntropyLoss()
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
            """,
            """
            %%memtrace -o r
            for i in range(60):
                data, target = torch.randn(10, 3, 24, 24), torch.randint(0, 10, (10,))
                optimizer.zero_grad()
                loss = criterion(model(data), target)
                loss.backward()
                optimizer.step()
            """,
        ),
        says=("running_(mean|var)", "graph"),
        fix=r"\.detach\(\)|no_grad",
        fixed=(
            ("momentum * mean", "momentum * mean.detach()"),
            ("momentum * var", "momentum * var.detach()"),
        ),
        works="model.bn.running_mean.grad_fn is None and bool(model.bn.running_mean.abs().sum() > 0)",
    ),
    ReportCase(
        name="running-loss-of-each-epoch",
        source="https://github.com/BatsResearch/labelmodels/issues/4",
        answer="running_loss is the sum of losses that are not detached, so graphs stay until the epoch is over: += loss.item().",
        magic="memtrace",
        cells=(
            """
            class NaiveBayes(nn.Module):
                def __init__(self, num_classes, num_lfs):
                    super().__init__()
                    self.num_classes, self.num_lfs = num_classes, num_lfs
                    self.class_balance = nn.Parameter(torch.zeros(num_classes))
                    self.accuracy = nn.Parameter(torch.ones(num_lfs, num_classes) * 2.0)
                    self.propensity = nn.Parameter(torch.zeros(num_lfs))

                def forward(self, votes):
                    norm = torch.log_softmax(self.class_balance, 0)
                    z = F.logsigmoid(self.propensity)[None, :, None] + F.logsigmoid(self.accuracy)[None] * (votes[:, :, None] > 0)
                    z = z - (votes[:, :, None] == 0) * F.softplus(self.propensity)[None, :, None]
                    return torch.logsumexp(norm[None] + z.sum(1), 1)

                def _get_regularization_loss(self):
                    return 0.01 * (self.accuracy ** 2).sum()
            """,
            """
            def estimate_label_model(model, batches, epochs=5, step_size=0.01):
                optimizer = torch.optim.SGD(model.parameters(), lr=step_size, momentum=0.9)
                for epoch in range(epochs):
                    model.train(True)
                    running_loss = 0.0
                    for i_batch, inputs in enumerate(batches):
                        optimizer.zero_grad()
                        log_likelihood = model(*inputs)
                        loss = -1 * torch.mean(log_likelihood)
                        loss += model._get_regularization_loss()
                        loss.backward()
                        optimizer.step()
                        running_loss += loss  # <- here
                    epoch_loss = running_loss / len(batches)
                    print('Train Loss: %.6f' % epoch_loss)
                return epoch_loss
            """,
            """
            votes = torch.randint(0, 3, (64 * 20, 10))
            batches = [(votes[i:i + 64],) for i in range(0, len(votes), 64)]
            label_model = NaiveBayes(2, 10)
            """,
            """
            %%memtrace -o r
            epoch_loss = estimate_label_model(label_model, batches)
            """,
        ),
        says=("running_loss", "graph"),
        fix=r"\.item\(\)|\.detach\(\)|float\(",
        fixed=(("running_loss += loss", "running_loss += loss.item()"),),
        works="isinstance(epoch_loss, float) and math.isfinite(epoch_loss)",
    ),
    ReportCase(
        name="average-meter-of-tensors",
        source="https://github.com/visionml/pytracking/pull/313",
        answer="_update_stats is given tensors with gradients, and AverageMeter adds their graphs up: give it numbers.",
        magic="memtrace",
        cells=(
            """
            from collections import OrderedDict

            class AverageMeter(object):
                def __init__(self):
                    self.clear()
                    self.has_new_data = False

                def reset(self):
                    self.avg = self.val = self.sum = self.count = 0

                def clear(self):
                    self.reset()
                    self.history = []

                def update(self, val, n=1):
                    self.val = val  # <- here
                    self.sum += val * n  # <- here
                    self.count += n
                    self.avg = self.sum / self.count

                def new_epoch(self):
                    if self.count > 0:
                        self.history.append(self.avg)
                        self.reset()
                        self.has_new_data = True
            """,
            """
            class Actor:
                def __init__(self, net):
                    self.net = net

                def __call__(self, data):
                    frames, boxes = data
                    pred = self.net(frames)
                    loss_iou = F.smooth_l1_loss(pred, boxes)
                    loss_l1 = F.l1_loss(pred, boxes)
                    loss = loss_iou + 0.5 * loss_l1
                    return loss, {'Loss/total': loss, 'Loss/iou': loss_iou}

            class LTRTrainer:
                def __init__(self, actor, loaders, optimizer):
                    self.actor, self.loaders, self.optimizer = actor, loaders, optimizer
                    self.stats = OrderedDict({name: None for name, training, loader in loaders})

                def cycle_dataset(self, name, training, loader):
                    torch.set_grad_enabled(training)
                    for i, data in enumerate(loader, 1):
                        loss, stats = self.actor(data)
                        if training:
                            self.optimizer.zero_grad()
                            loss.backward()
                            self.optimizer.step()
                        self._update_stats(stats, data[0].shape[0], name)

                def train_epoch(self):
                    for loader in self.loaders:
                        self.cycle_dataset(*loader)
                    for loader_stats in self.stats.values():
                        for stat_value in loader_stats.values():
                            stat_value.new_epoch()

                def _update_stats(self, new_stats, batch_size, name):
                    if self.stats[name] is None:
                        self.stats[name] = OrderedDict({key: AverageMeter() for key in new_stats})
                    for key, val in new_stats.items():
                        self.stats[name][key].update(val, batch_size)  # <- here
            """,
            """
            net = nn.Sequential(nn.Conv2d(3, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.Flatten(),
                                nn.Linear(8 * 6 * 6, 4))
            data = TensorDataset(torch.randn(240, 3, 30, 30), torch.randn(240, 4))
            loaders = [('train', True, DataLoader(data, 8, shuffle=True)), ('val', False, DataLoader(data, 24))]
            trainer = LTRTrainer(Actor(net), loaders, torch.optim.Adam(net.parameters()))
            """,
            """
            %%memtrace -o r
            for epoch in range(1, 4):
                trainer.train_epoch()
            torch.set_grad_enabled(True)
            """,
        ),
        says=("stats", "graph"),
        fix=r"\.item\(\)|\.detach\(\)|float\(",
        fixed=(("update(val, batch_size)", "update(val.item(), batch_size)"),),
        works="len(trainer.stats['train']['Loss/total'].history) == 3",
    ),
    ReportCase(
        name="class-tokens-of-a-vit",
        source="https://github.com/ViCCo-Group/thingsvision/pull/150",
        answer="act[:, 0, :] is a view that keeps the tokens of the whole batch: clone it.",
        magic="memtrace",
        cells=(
            """
            class VisionTransformer(nn.Module):
                def __init__(self, dim=96, patches=196):
                    super().__init__()
                    self.patch_embed = nn.Conv2d(3, dim, 4, stride=4)
                    self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
                    self.pos_embed = nn.Parameter(torch.randn(1, patches + 1, dim) * 0.02)
                    self.norm = nn.LayerNorm(dim)
                    self.head = nn.Linear(dim, 10)

                def forward(self, x):
                    x = self.patch_embed(x).flatten(2).transpose(1, 2)
                    x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
                    return self.head(self.norm(x)[:, 0])
            """,
            """
            class Extractor:
                def __init__(self, model, extract_cls_token=True):
                    self.model, self.extract_cls_token, self.activations = model.eval(), extract_cls_token, {}

                def get_activation(self, name):
                    def hook(model, input, output):
                        self.activations[name] = output.detach()
                    return hook

                def register_hook(self, module_name):
                    return self.model.get_submodule(module_name).register_forward_hook(self.get_activation(module_name))

                @torch.no_grad()
                def _extract_batch(self, batch, module_name, flatten_acts=False):
                    self.model(batch)  # <- here
                    act = self.activations[module_name]
                    if self.extract_cls_token:
                        act = act[:, 0, :]  # <- here
                    return act

                def extract_features(self, batches, module_name):
                    handle = self.register_hook(module_name)
                    features = []
                    for batch in batches:
                        features.append(self._extract_batch(batch, module_name))  # <- here
                    handle.remove()
                    return features
            """,
            """
            extractor = Extractor(VisionTransformer())
            images = torch.randn(16 * 16, 3, 56, 56)
            batches = DataLoader(images, batch_size=16)
            """,
            """
            %%memtrace -o r
            features = extractor.extract_features(batches, 'norm')
            """,
        ),
        says=("slice|view|part of", "features"),
        fix=r"\.clone\(\)",
        fixed=(("act[:, 0, :]", "act[:, 0, :].clone()"),),
        works="len(features) == 16 and features[0].untyped_storage().nbytes() == 16 * 96 * 4",
    ),
    ReportCase(
        name="curve-metric-that-is-not-reset",
        source="https://github.com/Lightning-AI/torchmetrics/issues/2921",
        answer="After validation only compute() is called on the metrics, so their list states keep every batch: call reset(), too.",
        magic="memtrace",
        needs="torchmetrics",
        cells=(
            """
            from torchmetrics.classification import BinaryPrecisionRecallCurve

            class OneClassPostProcessor:
                def __init__(self):
                    self._image_threshold_metric = BinaryPrecisionRecallCurve()
                    self._pixel_threshold_metric = BinaryPrecisionRecallCurve()
                    self._pixel_threshold = None

                def on_validation_batch_end(self, outputs):
                    self._image_threshold_metric.update(outputs["pred_score"], outputs["gt_label"])  # <- here
                    self._pixel_threshold_metric.update(outputs["anomaly_map"], outputs["gt_mask"])  # <- here

                def on_validation_epoch_end(self):
                    precision, recall, thresholds = self._pixel_threshold_metric.compute()  # <- here
                    f1 = 2 * precision * recall / (precision + recall + 1e-10)
                    self._pixel_threshold = thresholds[f1[:-1].argmax()]
                    self._image_threshold_metric.compute()  # <- here
            """,
            """
            model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
            optimizer = torch.optim.Adam(model.parameters())
            post_processor = OneClassPostProcessor()
            train = DataLoader(torch.randn(48, 3, 32, 32), 8, shuffle=True)
            val = DataLoader(TensorDataset(torch.randn(40, 3, 32, 32), torch.randint(0, 2, (40, 32, 32))), 8)
            """,
            """
            %%memtrace -o r
            for epoch in range(6):
                model.train()
                for x in train:
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()
                model.eval()
                with torch.no_grad():
                    for x, mask in val:
                        anomaly_map = model(x).squeeze(1).sigmoid()
                        post_processor.on_validation_batch_end({
                            "pred_score": anomaly_map.amax((1, 2)), "gt_label": mask.amax((1, 2)),
                            "anomaly_map": anomaly_map, "gt_mask": mask})
                post_processor.on_validation_epoch_end()
            """,
        ),
        says=("_pixel_threshold_metric",),
        fix=r"reset\(\)",
        fixed=(
            ("self._pixel_threshold_metric.compute()", "self._pixel_threshold_metric.compute(); self._pixel_threshold_metric.reset()"),
            ("self._image_threshold_metric.compute()", "self._image_threshold_metric.compute(); self._image_threshold_metric.reset()"),
        ),
        works="post_processor._pixel_threshold is not None",
    ),
    ReportCase(
        name="anchors-of-every-image-size",
        source="https://github.com/pytorch/vision/issues/1689",
        answer="Anchors of each grid are cached, and with a varying aspect ratio nearly every image has its own: empty the cache.",
        magic="memtrace",
        cells=(
            """
            class AnchorGenerator(nn.Module):
                def __init__(self, sizes=(32, 64, 128, 256, 512), aspect_ratios=(0.5, 1.0, 2.0)):
                    super().__init__()
                    self.sizes, self.aspect_ratios, self.cell_anchors, self._cache = sizes, aspect_ratios, None, {}

                def set_cell_anchors(self):
                    if self.cell_anchors is None:
                        ratios = torch.tensor(self.aspect_ratios)
                        h, w = torch.sqrt(ratios), 1 / torch.sqrt(ratios)
                        sizes = torch.tensor(self.sizes)
                        ws, hs = (w[:, None] * sizes[None]).view(-1), (h[:, None] * sizes[None]).view(-1)
                        self.cell_anchors = (torch.stack([-ws, -hs, ws, hs], 1) / 2).round()

                def grid_anchors(self, grid_sizes, strides):
                    anchors = []
                    for size, stride in zip(grid_sizes, strides):
                        y, x = torch.arange(size[0]) * stride[0], torch.arange(size[1]) * stride[1]
                        shifts_y, shifts_x = torch.meshgrid(y, x, indexing='ij')
                        shifts = torch.stack((shifts_x, shifts_y, shifts_x, shifts_y), 2).view(-1, 4)
                        anchors.append((shifts.view(-1, 1, 4) + self.cell_anchors.view(1, -1, 4)).reshape(-1, 4))  # <- here
                    return anchors

                def cached_grid_anchors(self, grid_sizes, strides):
                    key = tuple(grid_sizes) + tuple(strides)
                    if key in self._cache:
                        return self._cache[key]
                    anchors = self.grid_anchors(grid_sizes, strides)
                    self._cache[key] = anchors  # <- here
                    return anchors

                def forward(self, images, feature_maps):
                    grid_sizes = tuple(feature_map.shape[-2:] for feature_map in feature_maps)
                    strides = tuple((images.shape[-2] / g[0], images.shape[-1] / g[1]) for g in grid_sizes)
                    self.set_cell_anchors()
                    anchors = self.cached_grid_anchors(grid_sizes, strides)
                    return torch.cat(anchors)
            """,
            """
            class FasterRCNN(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.backbone = nn.Sequential(nn.Conv2d(3, 8, 7, stride=8, padding=3), nn.ReLU(),
                                                  nn.Conv2d(8, 16, 3, stride=2, padding=1))
                    self.anchor_generator = AnchorGenerator()
                    self.bbox_pred = nn.Conv2d(16, 15 * 4, 1)

                def forward(self, images, targets):
                    features = self.backbone(images)
                    anchors = self.anchor_generator(images, [features])
                    deltas = self.bbox_pred(features).permute(0, 2, 3, 1).reshape(-1, 4)
                    return {'loss_rpn_box_reg': F.l1_loss(deltas, (targets[0]['boxes'] - anchors) / 100)}

            model = FasterRCNN()
            """,
            """
            %%memtrace -o r
            import gc
            for i in range(25):
                size = random.randint(700, 900)
                images = torch.rand([1, 3, size, 800])
                targets = [{'boxes': torch.tensor([[10., 20., 30., 40.]]), 'labels': torch.tensor([1])}]
                model(images, targets)
                gc.collect()
            """,
        ),
        says=("_cache",),
        fix=r"bound|clear|maxsize",
        fixed=(("return torch.cat(anchors)", "self._cache.clear(); return torch.cat(anchors)"),),
        works="not model.anchor_generator._cache",
    ),
    ReportCase(
        name="method-cache-holds-the-model",
        source="https://github.com/huggingface/transformers/pull/45708",
        answer="lru_cache on a method keeps self as a part of the key, so the deleted model lives on in it: a cache for each instance.",
        magic="memtrace",
        cells=(
            """
            import gc
            from functools import lru_cache, wraps

            def compile_compatible_method_lru_cache(*lru_args, **lru_kwargs):
                def decorator(func):
                    func_with_cache = lru_cache(*lru_args, **lru_kwargs)(func)  # <- here
                    @wraps(func)
                    def wrapper(self, *args, **kwargs):
                        return func_with_cache(self, *args, **kwargs)  # <- here
                    return wrapper
                return decorator
            """,
            """
            class RTDetrModel(nn.Module):
                def __init__(self, d_model=128):
                    super().__init__()
                    self.backbone = nn.Sequential(nn.Conv2d(3, 64, 7, stride=8), nn.ReLU(), nn.Conv2d(64, d_model, 3, stride=2))
                    self.encoder = nn.TransformerEncoderLayer(d_model, 4, 512, batch_first=True)
                    self.enc_bbox_head = nn.Linear(d_model, 4)

                @compile_compatible_method_lru_cache(maxsize=32)  # <- here
                def generate_anchors(self, spatial_shapes, grid_size=0.05):
                    height, width = spatial_shapes
                    grid_y, grid_x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
                    grid = (torch.stack([grid_x, grid_y], -1) + 0.5) / torch.tensor([width, height])
                    return torch.cat([grid, torch.full_like(grid, grid_size)], -1).view(1, -1, 4)

                def forward(self, pixel_values):
                    features = self.backbone(pixel_values)
                    memory = self.encoder(features.flatten(2).transpose(1, 2))
                    return self.enc_bbox_head(memory) + self.generate_anchors(tuple(features.shape[-2:]))
            """,
            "pixel_values = torch.rand(1, 3, 160, 160)",
            """
            %%memtrace -o r
            m = RTDetrModel()
            with torch.no_grad():
                boxes = m(pixel_values)
            del m  # <- here
            gc.collect()
            """,
        ),
        says=("cache", "generate_anchors|func_with_cache"),
        fix=r"cache",
        fixed=(("@compile_compatible_method_lru_cache(maxsize=32)", ""),),
        works="boxes.shape[-1] == 4",
    ),
    ReportCase(
        name="backward-with-create-graph",
        source="https://github.com/pytorch/pytorch/issues/4661",
        answer="backward(create_graph=True) makes a cycle in C++ of the leaf and its gradient, which no collector sees: use autograd.grad.",
        magic="memtrace",
        cells=(
            "def f(x):\n    return (x ** 3).sum()",
            """
            %%memtrace -o r
            for i in range(40):
                x = torch.randn(200, 200, requires_grad=True)  # <- here
                y = f(x)
                y.backward(create_graph=True)  # <- here
                g = x.grad
                g.sum().backward()  # <- here
            """,
        ),
        says=("create_graph",),
        never=(r"no_grad",),
        fix=r"autograd\.grad|\.grad = None|to None",
        fixed=(("y.backward(create_graph=True)", "g, = torch.autograd.grad(y, x, create_graph=True)"), ("g = x.grad", "")),
        works="bool(torch.allclose(x.grad, 6 * x.detach(), rtol=1e-4, atol=1e-4))",
    ),
    ReportCase(
        name="metric-with-a-list-state",
        source="https://github.com/Lightning-AI/pytorch-lightning/issues/4098",
        answer="The metric's list state keeps each step's result with the graph that made it: metric states must be detached.",
        magic="memtrace",
        cells=(
            """
            class Metric(nn.Module):
                def __init__(self):
                    super().__init__()
                    self._defaults = {}

                def add_state(self, name, default):
                    setattr(self, name, list(default))
                    self._defaults[name] = default

                def forward(self, *args):
                    self.update(*args)
                    cache = {attr: getattr(self, attr) for attr in self._defaults}
                    self.reset()
                    self.update(*args)
                    result = self.compute()
                    for attr, val in cache.items():
                        setattr(self, attr, val)
                    return result

                def reset(self):
                    for attr, default in self._defaults.items():
                        setattr(self, attr, list(default))
            """,
            """
            class DifferentiableDiceCoefficient(Metric):
                def __init__(self, include_background=False):
                    super().__init__()
                    self.include_background = include_background
                    self.add_state("scores", [])

                def update(self, pred, target):
                    probs = pred.softmax(1)[:, 0 if self.include_background else 1:]
                    truth = F.one_hot(target, pred.shape[1]).movedim(-1, 1)[:, 0 if self.include_background else 1:]
                    score = 2 * (probs * truth).sum((2, 3)) / (probs.sum((2, 3)) + truth.sum((2, 3)) + 1e-6)  # <- here
                    self.scores.append(score.mean())  # <- here

                def compute(self):
                    return torch.stack(self.scores).mean()
            """,
            """
            class Segmenter(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.module = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
                    self._dice = DifferentiableDiceCoefficient(include_background=False)

                def training_step(self, batch, batch_idx):
                    x, y = batch
                    y_hat = self.module(x)
                    dice = self._dice(y_hat, y)  # <- here
                    loss = F.cross_entropy(y_hat, y) + (1 - dice)
                    return loss

            system = Segmenter()
            optimizer = torch.optim.Adam(system.parameters())
            loader = DataLoader(TensorDataset(torch.randn(160, 1, 32, 32), torch.randint(0, 4, (160, 32, 32))), 4)
            """,
            """
            %%memtrace -o r
            for batch_idx, batch in enumerate(loader):
                optimizer.zero_grad()
                loss = system.training_step(batch, batch_idx)
                loss.backward()
                optimizer.step()
            """,
        ),
        says=("_dice.scores",),
        fix=r"\.detach\(\)|\.item\(\)|reset\(\)",
        fixed=(("self.scores.append(score.mean())", "self.scores.append(score.mean().detach())"),),
        works="len(system._dice.scores) == 40 and not system._dice.scores[0].requires_grad",
    ),
    ReportCase(
        name="inputs-and-outputs-left-on-modules",
        source="https://github.com/jmschrei/tangermeme/pull/84",
        answer="Removing the hooks leaves the inputs and outputs that they put on the modules of every model: delete them, too.",
        magic="memtrace",
        cells=(
            """
            def _f_hook(module, inputs, outputs):
                module.input = inputs[0].clone().detach()  # <- here
                module.output = outputs.clone().detach()  # <- here

            def _register_hooks(module):
                if isinstance(module, (nn.ReLU, nn.MaxPool1d)):
                    module.handles = [module.register_forward_hook(_f_hook)]

            def _clear_hooks(module):
                if hasattr(module, "handles"):
                    for handle in module.handles:
                        handle.remove()
                    del module.handles  # <- here

            def deep_lift_shap(model, X):
                model.apply(_register_hooks)
                X = X.clone().requires_grad_()
                y = model(X)
                attributions, = torch.autograd.grad(y.sum(), X)
                model.apply(_clear_hooks)
                return (attributions * X).detach()
            """,
            """
            def bpnet(n_filters=16):
                return nn.Sequential(nn.Conv1d(4, n_filters, 21, padding=10), nn.ReLU(),
                                     nn.Conv1d(n_filters, n_filters, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(n_filters * 500, 1))

            models = [bpnet() for i in range(8)]
            X = F.one_hot(torch.randint(4, (8, 500)), 4).float().transpose(1, 2)
            """,
            """
            %%memtrace -o r
            attributions = []
            for model in models:
                attributions.append(deep_lift_shap(model, X))
            """,
        ),
        says=(r"models.*\.(input|output)",),
        fix=r"del |None|delete",
        fixed=(("del module.handles", "del module.handles, module.input, module.output"),),
        works="len(attributions) == 8 and not hasattr(models[0][1], 'input')",
    ),
    ReportCase(
        name="only-the-first-iterations-grow",
        source="https://github.com/pytorch/pytorch/issues/1509",
        answer="Nothing is wrong: gradients and momentum are made in the first steps, and then the memory stays as it is.",
        magic="memtrace",
        healthy=True,
        cells=(
            """
            class AverageMeter(object):
                def __init__(self):
                    self.val = self.avg = self.sum = self.count = 0

                def update(self, val, n=1):
                    self.val = val
                    self.sum += val * n
                    self.count += n
                    self.avg = self.sum / self.count
            """,
            """
            def train(train_loader, model, criterion, optimizer, epoch):
                batch_time, data_time, losses = AverageMeter(), AverageMeter(), AverageMeter()
                model.train()
                end = time.time()
                for i, (input, target) in enumerate(train_loader):
                    data_time.update(time.time() - end)
                    output = model(input)
                    loss = criterion(output, target)
                    losses.update(loss.item(), input.size(0))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    batch_time.update(time.time() - end)
                    end = time.time()
                return losses.avg
            """,
            """
            model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
                                  nn.Conv2d(16, 16, 3, padding=2, dilation=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 21, 1))
            optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=5e-4)
            criterion = nn.CrossEntropyLoss()
            train_set = TensorDataset(torch.randn(12, 3, 64, 64), torch.randint(21, (12, 64, 64)))
            train_loader = DataLoader(train_set, batch_size=1, shuffle=True)
            """,
            """
            %%memtrace -o r
            for epoch in range(3):
                avg = train(train_loader, model, criterion, optimizer, epoch)
            """,
        ),
    ),
    ReportCase(
        name="replay-memory-that-fills",
        source="https://github.com/toshikwa/sac-discrete.pytorch/issues/28",
        answer="Nothing is wrong: the replay memory holds up to 300,000 steps, and the memory grows until it is full.",
        magic="memtrace",
        healthy=True,
        cells=(
            """
            class LazyMemory(dict):
                def __init__(self, capacity, state_shape):
                    super().__init__()
                    self.capacity, self.state_shape = int(capacity), state_shape
                    self.reset()

                def reset(self):
                    self['state'], self['next_state'] = [], []
                    self['action'] = np.empty((self.capacity, 1), dtype=np.int64)
                    self['reward'] = np.empty((self.capacity, 1), dtype=np.float32)
                    self._n = self._p = 0

                def append(self, state, action, reward, next_state):
                    self['state'].append(state)
                    self['next_state'].append(next_state)
                    self['action'][self._p] = action
                    self['reward'][self._p] = reward
                    self._n = min(self._n + 1, self.capacity)
                    self._p = (self._p + 1) % self.capacity
                    while len(self['state']) > self.capacity:
                        del self['state'][0]
                        del self['next_state'][0]

                def sample(self, batch_size):
                    indices = np.random.randint(0, self._n, batch_size)
                    states = torch.tensor(np.array([self['state'][i] for i in indices])).float() / 255.
                    next_states = torch.tensor(np.array([self['next_state'][i] for i in indices])).float() / 255.
                    return states, torch.tensor(self['action'][indices]), torch.tensor(self['reward'][indices]), next_states
            """,
            """
            memory = LazyMemory(300000, (4, 84, 84))
            def q_network():
                return nn.Sequential(nn.Conv2d(4, 8, 8, stride=4), nn.ReLU(), nn.Conv2d(8, 8, 4, stride=2), nn.ReLU(),
                                     nn.Flatten(), nn.Linear(8 * 81, 6))

            online, target = q_network(), q_network()
            optim = torch.optim.Adam(online.parameters(), lr=0.0003)

            def explore(state):
                with torch.no_grad():
                    return online(torch.tensor(state[None]).float() / 255.).argmax(1).item()

            def learn(batch_size=16, gamma=0.99):
                states, actions, rewards, next_states = memory.sample(batch_size)
                q = online(states).gather(1, actions)
                with torch.no_grad():
                    wanted = rewards + gamma * target(next_states).max(1, keepdim=True).values
                loss = F.mse_loss(q, wanted)
                optim.zero_grad()
                loss.backward()
                optim.step()
            """,
            """
            %%memtrace -o r
            state = np.random.randint(0, 255, (4, 84, 84), dtype=np.uint8)
            for steps in range(200):
                action = explore(state)
                next_state = np.random.randint(0, 255, (4, 84, 84), dtype=np.uint8)
                memory.append(state, action, random.random(), next_state)
                state = next_state
                if steps >= 20 and steps % 4 == 0:
                    learn()
            """,
        ),
    ),
    ReportCase(
        name="adaptation-steps-of-maml",
        source="https://github.com/tristandeleu/pytorch-maml/issues/21",
        answer="Nothing leaks: backpropagation through the inner updates needs memory in proportion to their number.",
        magic="memtrace",
        healthy=True,
        cells=(
            """
            from collections import OrderedDict

            class ModelAgnosticMetaLearning:
                def __init__(self, model, optimizer, step_size=0.1, num_adaptation_steps=5):
                    self.model, self.optimizer, self.step_size = model, optimizer, step_size
                    self.num_adaptation_steps = num_adaptation_steps

                def adapt(self, inputs, targets):
                    params = OrderedDict(self.model.named_parameters())
                    results = {'inner_losses': np.zeros((self.num_adaptation_steps,), dtype=np.float32)}
                    for step in range(self.num_adaptation_steps):
                        logits = torch.func.functional_call(self.model, params, (inputs,))
                        inner_loss = F.cross_entropy(logits, targets)
                        results['inner_losses'][step] = inner_loss.item()
                        grads = torch.autograd.grad(inner_loss, params.values(), create_graph=True)
                        params = OrderedDict((name, param - self.step_size * grad) for (name, param), grad in zip(params.items(), grads))
                    return params, results

                def get_outer_loss(self, batch):
                    mean_outer_loss = torch.tensor(0.)
                    for train_inputs, train_targets, test_inputs, test_targets in zip(*batch):
                        params, results = self.adapt(train_inputs, train_targets)
                        test_logits = torch.func.functional_call(self.model, params, (test_inputs,))
                        mean_outer_loss += F.cross_entropy(test_logits, test_targets)
                    return mean_outer_loss.div_(len(batch[0]))

                def train(self, batches):
                    for batch in batches:
                        self.optimizer.zero_grad()
                        outer_loss = self.get_outer_loss(batch)
                        outer_loss.backward()
                        self.optimizer.step()
                    return outer_loss.item()
            """,
            """
            model = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
            metalearner = ModelAgnosticMetaLearning(model, torch.optim.Adam(model.parameters(), lr=1e-3), num_adaptation_steps=10)
            def tasks(shots):
                return torch.randn(4, shots, 40), torch.randint(5, (4, shots))

            batches = [(*tasks(25), *tasks(75)) for _ in range(10)]
            """,
            """
            %%memtrace -o r
            outer_loss = metalearner.train(batches)
            """,
        ),
    ),
)
