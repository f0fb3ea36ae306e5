# SPDX-License-Identifier: Apache-2.0
"""The paper's experiments: their runs, the results as rows, and tables and pages made from the rows."""
