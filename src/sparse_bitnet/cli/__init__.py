# SPDX-License-Identifier: Apache-2.0
"""The command line: a file for the commands of one idea, reached through the table in `main`."""
