"""`ddpkit report`: record of a run -> RunHistory -> findings and charts -> one HTML page, or pictures."""
