"""What this machine, or one of the catalogue, can do.

Without NAME: this machine. Its ceilings are measured once, quickly, and kept for
each device, driver and torch version; --calibrate measures everything, and again.

With NAME, an id (h100-sxm) or the exact name that the driver reports
("NVIDIA H100 PCIe"): the datasheet's figures with their sources, and what code
can be expected to reach of them.
"""

from __future__ import annotations

import argparse

from nearpeak._stage_times import stage
from nearpeak.cli.output import narrate, print_result
from nearpeak.errors import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    parser.add_argument("name", nargs="*", metavar="NAME", help="an id of the catalogue or an exact driver name")
    parser.add_argument("--list", action="store_true", help="list the machines of the catalogue")
    parser.add_argument("--networks", action="store_true", help="list the networks of the catalogue")
    parser.add_argument("--calibrate", action="store_true", help="measure all of this machine, and again")
    parser.add_argument("--json", metavar="FILE", help="also write JSON to FILE; - writes JSON alone to stdout")


def run(arguments: argparse.Namespace) -> int:
    """Print the machine, or a list, as text or as JSON."""
    name = " ".join(arguments.name)
    asked = {
        "NAME": bool(name),
        "--list": arguments.list,
        "--networks": arguments.networks,
        "--calibrate": arguments.calibrate,
    }
    given = [option for option, value in asked.items() if value]
    if len(given) > 1:
        hint = " --calibrate measures the machine that it runs on." if arguments.calibrate else ""
        raise UsageError(f"{' and '.join(given)} cannot be combined.{hint}")
    _show(arguments, name)
    return 0


def _show(arguments: argparse.Namespace, name: str) -> None:
    from nearpeak.machines import catalogue
    from nearpeak.render.text import text
    from nearpeak.render.views.machine import catalogue_document, document, networks_document

    if arguments.list:
        machines = catalogue.machines()
        print_result(text(catalogue_document(machines)), machines, arguments.json)
    elif arguments.networks:
        networks = catalogue.networks()
        print_result(text(networks_document(networks)), networks, arguments.json)
    elif name:
        machine = catalogue.find(name)
        print_result(text(document(machine)), machine, arguments.json)
    else:
        with stage("imports"):
            from nearpeak.calibrate.machine import machine as this_machine

        machine = this_machine(calibrate=arguments.calibrate, progress=narrate)
        print_result(text(document(machine)), machine, arguments.json)
