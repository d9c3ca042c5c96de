"""How Millrace learns: samples in, new weights out. It knows no Kafka; of `infra` it uses durable files alone.

A GRPO step from tensors to new weights (this example runs as a test):

    import numpy as np
    from millrace.trainers.algorithms.registry import algorithm
    from millrace.trainers.backends.torch.backend import TorchBackend
    from millrace.trainers.batches.sample import Sample
    from millrace.trainers.learning import Schedule, Trainer
    from millrace.trainers.weights import checkpoint

    def sample(reply, logprobs, reward, group, name):
        prompt = [1, 24, 6, 4, 17]
        ids = prompt + reply
        generated = [0] * len(prompt) + [1] * len(reply)
        return Sample(
            tokens=np.array(ids, np.int32),
            mask=np.array(generated, np.uint8),
            logprobs=np.array([0.0] * len(prompt) + logprobs, np.float32),
            versions=np.array([-1] * len(prompt) + [0] * len(reply), np.int32),
            reward=reward, seq=group, group=str(group), trajectory=name,
        )

    trainer = Trainer(TorchBackend(device="cpu"), algorithm("grpo", minibatches=1), Schedule(lr=5e-4))
    trainer.backend.form(rank=0, world=1, store=None, timeout=30.0)
    trainer.load(checkpoint.adopt(model_dir))
    batch = [
        sample([4, 6, 2], [-0.9, -1.2, -0.1], 1.0, group=0, name="a"),
        sample([6, 4, 2], [-1.1, -0.8, -0.2], 0.0, group=0, name="b"),
    ]
    report = trainer.train(batch, minibatches=[[0]], version=0)
    state = trainer.backend.gather()
    path = checkpoint.write(weights_dir, version=1, state=state).path
    trainer.backend.tear_down()
"""
