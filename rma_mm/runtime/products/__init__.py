"""Plans of products: made, kept, executed, watched and told of."""
