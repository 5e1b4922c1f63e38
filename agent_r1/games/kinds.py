"""The games by their names, in the words in which a player is told of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from agent_r1.games import bandit, lake, sokoban
from agent_r1.games.players import Player
from agent_r1.games.rules import Game, Start


class PlayedGame(NamedTuple):
    """A game, how it is told, who plays it without a model, and how its boards are drawn."""

    open: Callable[[str, random.Random], Game]  # by its setup
    # By its section of prepare.worlds, a split and its seeds.
    starts: Callable[[Any, str, range], Iterator[Start]]
    # Chance, a solver, and a demonstrator that makes mistakes, so often that there is something to be learned beyond.
    players: Mapping[str, Player]
    rules: str
    symbols: str = ""  # the cells of its grid, if it has one
    most_moves: int | None = None  # after which it is over


GAMES = {
    "bandit": PlayedGame(
        lambda setup, rng: bandit.Game(bandit.Board.read(setup), rng),
        bandit.starts,
        bandit.PLAYERS,
        "You are playing a bandit game with two arms. How much an arm pays, and how surely, goes with its name. Pull "
        "the arm that you expect to pay more on average.",
        most_moves=1,
    ),
    "frozen_lake": PlayedGame(
        lambda setup, rng: lake.Game(lake.Board.read(setup), rng),
        lake.starts,
        lake.PLAYERS,
        "You are solving the FrozenLake puzzle. Walk over the ice to the goal and stay out of the holes. The ice may "
        "be slippery: then a move can take you to one of its sides.",
        "P: player, _: ice, O: hole, G: goal, X: player in a hole, √: player on the goal",
    ),
    "sokoban": PlayedGame(
        lambda setup, rng: sokoban.Game(sokoban.Board.read(setup), rng),
        sokoban.starts,
        sokoban.PLAYERS,
        "You are solving the Sokoban puzzle. Push every box onto a target. You push a box by walking against it; it "
        "goes neither into a wall nor into another box, and you cannot pull it.",
        "#: wall, _: empty, O: target, √: box on target, X: box, P: player, S: player on target",
    ),
}
