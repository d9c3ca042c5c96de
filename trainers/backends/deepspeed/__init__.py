"""DeepSpeed: ZeRO 0 to 3."""
