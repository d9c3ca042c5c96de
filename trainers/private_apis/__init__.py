"""The private parts of torch, DeepSpeed, Megatron and transformers that training needs, each behind a name that says
what it does, in a file of its package. A new release of one of them is checked here.

Invariants: no other module of trainers imports or touches a private name of another package; what sends or receives
weights imports neither transformers nor FSDP through here.
"""
