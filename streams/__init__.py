"""What happens between capture and learning: refine, reward, seal, dispatch."""
