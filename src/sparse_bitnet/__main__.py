# SPDX-License-Identifier: Apache-2.0
"""`python -m sparse_bitnet` is `sparse-bitnet`."""

from sparse_bitnet.cli.main import main

main()
