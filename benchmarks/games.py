"""What chance and the best plans reach on the games' boards, exactly: `python -m benchmarks.games [--store]`.

Means over 256 boards: on the ice those of RAGEN's validation seeds, in Sokoban drawn to the lengths of its levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import mean

from agent_r1.games import lake, sokoban
from agent_r1.games.rules import Cell
from benchmarks.stored import Row, options, show

VALIDATION = range(123, 379)
STEPS, MOVES = 5, 10
BUDGETS = range(1, 6)  # moves a turn


def uniform_on_ice(board: lake.Board, moves: int = MOVES) -> float:
    """The chance to reach the goal with uniform moves."""
    at, won = {board.start: 1.0}, 0.0
    side = (1 - board.intended) / 2
    leads = [(board.intended, 0), (side, 1), (side, -1)]
    for _ in range(moves):
        after = dict[Cell, float]()
        for place, chance in at.items():
            for number in range(4):
                for share, turn in leads:
                    to = board.after(place, [*lake.MOVES][(number + turn) % 4])
                    won += chance * share / 4 * (to == board.goal)
                    if board.cell(to) in "FS":
                        after[to] = after.get(to, 0.0) + chance * share / 4
        at = after
    return won


def uniform_in_sokoban(board: sokoban.Board, moves: int = MOVES) -> float:
    """The chance to push the box onto its target with uniform moves."""
    at, won, targets = {board.start: 1.0}, 0.0, board.targets
    for _ in range(moves):
        after = dict[sokoban.RoomState, float]()
        for state, chance in at.items():
            for move in sokoban.MOVES:
                there = board.after(state, move)
                if there.boxes == targets:
                    won += chance / 4
                else:
                    after[there] = after.get(there, 0.0) + chance / 4
        at = after
    return won


def planned_on_ice(board: lake.Board, moves_per_step: int, steps: int) -> float:
    """The chance of the best plans, of which so many moves at a time are made without looking."""
    return lake.Planner(board, moves_per_step).best(board.start, steps, MOVES).chance


def solvable_on_ice(board: lake.Board, moves: int) -> float:
    """1 where so many moves lead to the goal, if none goes astray."""
    return float(len(board.way(board.start) or ()) <= moves)


def solvable_in_sokoban(board: sokoban.Board, moves: int = MOVES) -> float:
    """1 where so many moves solve the board."""
    return float(board.solve(board.start, moves) is not None)


def shown(chances: Iterable[float]) -> str:
    """Their mean, as it is shown."""
    found = mean(chances)
    return "1" if found == 1 else f"{found:.3f}".lstrip("0")


def ice(frozen: float, intended: float) -> list[lake.Board]:
    return [lake.Board.draw(seed, frozen=frozen, intended=intended) for seed in VALIDATION]


def reached(rooms: dict[str, list[sokoban.Board]]) -> Iterable[Row]:
    """Of either game the floor and the ceiling; on the ice also that of whoever sees every move."""
    for frozen, intended, said, at_once in ((0.8, 1 / 3, "1/3", 5), (0.9, 0.8, ".8", 2)):
        boards, best = ice(frozen, intended), [(at_once, STEPS), (1, MOVES)]
        blind, seeing = (shown(planned_on_ice(board, at, steps) for board in boards) for at, steps in best)
        name = f"FrozenLake, ice .{10 * frozen:.0f}, a move as intended {said}, {at_once} moves a turn"
        yield _reached(name, shown(map(uniform_on_ice, boards)), blind, seeing)
    for name, drawn in rooms.items():
        solved = shown(map(solvable_in_sokoban, drawn))
        yield _reached(f"Sokoban, {name}", shown(map(uniform_in_sokoban, drawn)), solved, solved)


def _reached(boards: str, floor: str, ceiling: str, seeing: str) -> Row:
    return {"boards": boards, "`random`": floor, "`oracle`": ceiling, "if every move is seen": seeing}


def by_budget(rooms: list[sokoban.Board]) -> Iterable[Row]:
    """What chance reaches, and how much can be solved, as the moves of a turn grow."""
    still = ice(0.8, 1.0)
    chances: dict[str, Callable[[int], Iterable[float]]] = {
        "FrozenLake, ice .8, at any slip: `random`": lambda moves: (uniform_on_ice(each, moves) for each in still),
        "... without slips, solvable": lambda moves: (solvable_on_ice(each, moves) for each in still),
        "Sokoban, drawn to RAGEN's lengths: `random`": lambda moves: (
            uniform_in_sokoban(each, moves) for each in rooms
        ),
        "... solvable": lambda moves: (solvable_in_sokoban(each, moves) for each in rooms),
    }
    for name, of in chances.items():
        budgets = {f"{at_once}, {STEPS * at_once}": shown(of(STEPS * at_once)) for at_once in BUDGETS}
        yield {"moves a turn, in all": name, **budgets}


def main() -> None:
    parser = options("Computes the floors and ceilings of the games.")
    store = parser.parse_args().store
    to_lengths = sokoban.Board.drawn_to(VALIDATION[0], sokoban.RAGEN_LENGTHS)
    rooms = {
        "drawn to the lengths of RAGEN's levels (`sokoban.RAGEN_LENGTHS`)": to_lengths,
        "as drawn": [sokoban.Board.draw(seed) for seed in VALIDATION],
    }
    show("games", list(reached(rooms)), store=store)
    show("moves", list(by_budget(to_lengths)), store=store)


if __name__ == "__main__":
    main()
