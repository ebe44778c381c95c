"""The sweep of many layouts from conversion to speed, on one machine: stages are planned, run one after another, and
kept."""
