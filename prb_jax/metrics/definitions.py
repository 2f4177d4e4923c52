"""What each key of a summary means; written into the file beside the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from prb_jax.metrics.clusters import OVER_COMPARISONS, OVER_DERIVED_USERS, OVER_USERS, Clusters

_SCORE: Final = (
    "a score interval: the means from which the accuracy is at most t standard errors away, each with the standard "
    "error of a beta-binomial distribution with this mean and its most likely correlation within {over}"
)
_TWO_WAY: Final = (
    "two-way clustered over {over} and {responses}, because several users judge the same responses: the variance by "
    "users, plus the one by responses, minus the one by both (Cameron, Gelbach and Miller), never below {least}, "
    "in Wilson's interval with a t quantile of one degree of freedom less than the smaller "
    "effective number of clusters; over {over} alone where fewer than ten rows are won, or lost"
)
_DEFINITIONS: Final[Mapping[str, str]] = {
    "n": "scored comparisons",
    "accuracy": "strict wins / n: the best score among the highest labels is above the best of the others; "
    "a tie is not a win",
    "ci95": "95 % interval over {over}, {method}; null with fewer than six clusters",
    "ci95_reason": "why ci95 is null; null where there is an interval (so for every key that ends in _reason)",
    "ties": "comparisons in which those two scores are equal",
    "half_credit_accuracy": "(strict wins + ties / 2) / n; shown in tables where ties exceed one in a hundred",
    "mean_margin": "mean of the best score among the highest labels minus the best of the others",
    "accuracy_by_subset": "the accuracy within each subset",
    "by_subset": "n, accuracy, ci95, ties and half_credit_accuracy within each subset; null where undefined",
    "users": "distinct users; rows without a user do not enter the user figures",
    "users_derived": "whether the data name no users, and rows whose profiles share a post (connected components "
    "of post ids; of ids and texts for ids that occur with several texts) are taken to be of one user",
    "user_accuracy": "mean over users of each user's accuracy; null without users",
    "user_accuracy_ci95": "95 % interval over {over}, {score}",
    "user_accuracy_ci95_reason": "why user_accuracy_ci95 is null",
    "users_testable": "users who would be served if all their rows were won",
    "coverage": "share of the testable users who are served: whose accuracy is above chance (1/K for one best of K "
    "responses) by a one-sided exact binomial test at 0.05; null where nobody is testable",
    "coverage_reason": "why coverage is null",
    "coverage_ci95": "95 % score interval (Wilson) over the testable users",
    "coverage_ci95_reason": "why coverage_ci95 is null",
    "coverage_by_chance": "the share of testable users who would be served by scores without meaning: the mean size "
    "of the tests",
    "coverage_benjamini_hochberg": "the share served after the correction of Benjamini and Hochberg over the "
    "testable users, at 0.05",
    "crossed": "null where no two users judge the same responses (not looked for in data that are read by windows); "
    "else the number of clusters of responses, and whether a cluster is a whole set of responses or a single one",
    "truncated": "comparisons of which any text was cut",
    "truncation": "how much was cut in all, by kind",
    "length_baseline": "accuracy of always preferring the longest response (characters), same rows",
    "baselines": "the same figures for each baseline; difference = accuracy minus the baseline's, paired, with a 95 % "
    "t interval {paired} (difference_ci95); null, with the reason in difference_ci95_reason, where one of the two is "
    "not defined or the model is this baseline",
}


def definitions(clusters: Clusters) -> dict[str, str]:
    """Return the meaning of each key of a summary of these rows."""
    over = clusters.over
    what = {OVER_USERS: "a user", OVER_DERIVED_USERS: "a derived user", OVER_COMPARISONS: "a comparison"}[
        over
    ]
    score = _SCORE.format(over=what)
    if over == OVER_USERS and any(user is None for user in clusters.users):
        over = "users (a row without a user is a cluster of its own)"
    if clusters.responses is None:
        method, paired = score, f"over {over}"
    else:
        sets = len(clusters.responses[0]) == 1
        responses = "sets of responses" if sets else "responses"
        least = "the smaller one of the first two" if sets else "the one by users"
        method = _TWO_WAY.format(over=over, responses=responses, least=least)
        paired = f"two-way clustered over {over} and {responses}"
    return {
        key: text.format(over=over, method=method, score=score, paired=paired)
        for key, text in _DEFINITIONS.items()
    }
