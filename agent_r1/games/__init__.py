"""Rules of games, exact and without a text: what is drawn, what a move does, and how each is played best."""
