"""Where the tables lie: the contract of a store with its siblings, the tables and columns, and who may write them."""
