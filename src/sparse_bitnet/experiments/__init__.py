# SPDX-License-Identifier: Apache-2.0
"""Whole experiments: which runs, their results as rows, and the tables and pages made of them."""
