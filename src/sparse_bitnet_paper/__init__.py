# SPDX-License-Identifier: Apache-2.0
"""The paper's experiments: which runs, their results as rows, and the tables and pages made of them."""
