// Command mutants breaks the product on purpose and checks that tests fail.
//
// Patches break one law each. Each patch in e2e/mutants names its law, and tests that must fail with it: of a package
// (Test), any of a package (Suite), or one that runs the programs, which are built with the patch (E2E):
//
//	Law: 2
//	Breaks: a generation below the accepted one is taken
//	Test: ./agent/internal/state TestLaw02StateNeverGoesBackwards
//	E2E: ./e2e/recovery TestLaw02AHubThatIsBehindIsRefused
//
//	--- a/agent/internal/state/accept.go
//	+++ b/agent/internal/state/accept.go
//	…
//
// CI runs one patch of each law, the same one each time; -all runs every patch.
//
// Generated mutants are small changes that this program makes of the syntax trees: another comparison, a condition or a
// call left out, two calls in another order, a condition of an SQL statement that always holds. sample.txt says how
// many of each package are taken. Which ones follows from their names and a fixed seed, so that the list changes only
// where the code does. Each must be noticed by the tests of its own package or of those that use the package most;
// tests that run into their time limit count as noticed and are listed as such. equivalent.txt lists those that change
// nothing that is promised, with the reason.
//
// Existing programs for Go (gremlins, go-mutesting and its forks) change the tree or a copy of it, mutate no SQL, know
// no neighbours and no weights, and have no sandbox for tests that need root.
//
// The tree itself is never touched: the compiler reads the changed files through its overlay.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"syscall"
)

func main() {
	if len(os.Args) > 2 && os.Args[1] == inSandbox {
		code, err := runInSandbox(os.Args[2:])
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(code)
	}
	var o options
	only := flag.String("run", "", "take only the mutants whose name matches this expression")
	flag.BoolVar(&o.all, "all", false, "take every patch and every generated mutant of the sample, not only the short one")
	flag.BoolVar(&o.e2e, "e2e", false, "run only the end-to-end tests of the patches that name one")
	flag.BoolVar(&o.list, "list", false, "print the generated mutants and run none")
	flag.BoolVar(&o.patches, "patches", true, "run the patches")
	flag.BoolVar(&o.generated, "generated", true, "run the generated mutants")
	flag.IntVar(&o.jobs, "j", 2, "mutants at a time")
	flag.IntVar(&o.neighbours, "neighbours", 3, "packages beside its own whose tests a mutant must pass to survive")
	flag.StringVar(&o.seed, "seed", seed, "choose other generated mutants")
	flag.Parse()
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	if err := run(ctx, o, *only); err != nil {
		fmt.Fprintln(os.Stderr, err)
		cancel()
		os.Exit(1) //nolint:gocritic // cancel ran
	}
}

func run(ctx context.Context, o options, only string) (err error) {
	if o.match, err = regexp.Compile(only); err != nil {
		return err
	}
	if o.patches && !o.list {
		err = runPatches(ctx, o)
	}
	if o.generated && !o.e2e {
		err = errors.Join(err, runGenerated(ctx, o))
	}
	return err
}
