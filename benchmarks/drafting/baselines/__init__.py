"""Other ways to draft, written for comparison only, and the replay of recorded responses that compares them."""
