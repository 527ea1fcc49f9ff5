package harness_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// otherBounds are the waits of end-to-end tests that ConvergenceBound does not bound, by what does.
func otherBounds() map[string][]string {
	return map[string][]string{
		"pointWait is shorter; a point may be reached later": {
			"chaos/kill_rounds_test.go collectCrashes: time.After",
		},
		"bounds a whole test, or what is made before it; each wait in it has its own bound": {
			"chaos/kill_test.go newKillTest: context.Background",
			"chaos/kill_test.go newKillTest: context.WithTimeout killLimit",
			"chaos/storm_test.go newStorm: context.Background",
			"chaos/storm_test.go newStorm: context.WithTimeout stormLimit",
			"harness/main.go runInSandbox: context.Background",
			"harness/main.go runInSandbox: context.WithTimeout prepareLimit",
			"harness/prepared.go makeHub: context.Background",
			"harness/prepared.go makeHub: context.WithTimeout testLimit",
			"harness/testbed.go newTestbed: context.Background",
			"harness/testbed.go newTestbed: context.WithTimeout testLimit",
		},
		"a clean-up runs when the test's context has ended": {
			"chaos/kill_test.go newKillTest: context.WithoutCancel",
			"cli/preflight_test.go TestTheAgentReportsMisconfigurationsAndChangesNothing: context.WithoutCancel",
			"cluster/machine_test.go newMachine: context.Background",
			"cluster/machine_test.go newMachines: context.Background",
			"guide/guide_test.go newGuideRun: context.WithoutCancel",
			"harness/testbed.go StartAgent: context.WithoutCancel",
			"power/machine_test.go newMachine: context.Background",
		},
		"stepLimit bounds a step of a round: shorter than law 13's time, although programs are killed meanwhile": {
			"chaos/kill_test.go restartWhile: context.WithTimeout stepLimit",
			"chaos/kill_test.go until: time.After",
			"chaos/removal_test.go killRemoval: context.WithTimeout stepLimit",
			"chaos/volumes_test.go pollUntil: time.After",
		},
		"stormBound bounds what follows the last kill": {
			"chaos/storm_test.go pause: time.NewTimer",
		},
		"the context has law 13's bound": {
			"cluster/cluster_test.go awaitMember: Watch",
			"harness/audit.go observe: context.WithoutCancel",
			"lifecycle/pull_test.go TestAPullFromASlowRegistryShowsHowFarItIs: FollowInstance",
		},
		"a command on the machine, which ends by itself": {
			"cluster/cluster_test.go has: context.Background",
			"harness/testbed.go declaration: context.Background",
		},
		"a program that the test ends": {
			"cluster/cluster_test.go operate: context.Background",
		},
		"paces what goes on until the test ends it; nothing waits for it": {
			"harness/containerd_oracle.go WatchContainerd: time.After",
			"harness/kernel_oracle.go WatchKernel: time.NewTicker",
			"harness/monitor.go repeatUntilStopped: time.NewTicker",
		},
		"the context or bound that it is given": {
			"harness/wait.go Await: context.WithTimeout bound",
			"harness/wait.go Await: time.NewTicker",
		},
		"noticeTime": {"harness/kernel_oracle.go awaitShim: time.NewTicker"},
		"the time that must not be billed": {
			"lifecycle/field_steps_test.go stopAndStart: time.Sleep",
		},
		"the rate of a slow network": {
			"lifecycle/pull_test.go carry: time.Sleep",
		},
		"the moment of the power cut": {
			"power/cut_test.go TestLaw13ANodeWhosePowerIsCutAtWorkConverges: time.Sleep",
		},
		"how long an agent may take to end": {
			"security/altered_test.go observesOrEnds: context.WithTimeout EndLimit",
		},
	}
}

// waitsOf lists how the functions of a file wait: each as <function>: <how>.
func waitsOf(file *ast.File) (found []string) {
	for _, d := range file.Decls {
		name := "declaration"
		if f, is := d.(*ast.FuncDecl); is {
			name = f.Name.Name
		}
		ast.Inspect(d, func(n ast.Node) bool {
			call, is := n.(*ast.CallExpr)
			if !is {
				return true
			}
			if how := waitIn(call); how != "" {
				found = append(found, name+": "+how)
			}
			return true
		})
	}
	return found
}

// waitIn tells how a call waits for longer than law 13 allows, or for an unknown time; empty where it does not.
func waitIn(call *ast.CallExpr) string {
	fun, is := call.Fun.(*ast.SelectorExpr)
	if !is {
		return ""
	}
	of, _ := fun.X.(*ast.Ident)
	qualified := fun.Sel.Name
	if of != nil {
		qualified = of.Name + "." + fun.Sel.Name
	}
	switch {
	case slices.Contains([]string{
		"require.Eventually", "require.EventuallyWithT", "require.Never", "assert.Eventually", "assert.EventuallyWithT",
		"assert.Never", "time.After", "time.AfterFunc", "time.NewTicker", "time.NewTimer", "time.Sleep", "time.Tick",
		"context.Background", "context.TODO", "context.WithoutCancel", "scenario.AwaitNode",
	}, qualified):
		return qualified
	case slices.Contains([]string{"WaitInstance", "FollowInstance", "Watch"}, fun.Sel.Name):
		return fun.Sel.Name
	case slices.Contains([]string{"context.WithTimeout", "context.WithDeadline", "harness.Await"}, qualified):
		if bound := nameOf(call.Args[1]); bound != "ConvergenceBound" {
			return qualified + " " + bound
		}
	}
	return ""
}

// nameOf is the name of a constant, with or without its package.
func nameOf(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return e.Sel.Name
	default:
		return "expression"
	}
}

// endToEnd are the directories of the packages whose main function runs them in a sandbox, and of the harness.
func endToEnd(t *testing.T) (dirs []string) {
	t.Helper()
	mains, err := filepath.Glob("../*/main_test.go")
	require.NoError(t, err)
	for _, path := range mains {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		if strings.Contains(string(text), "harness.RunTests") {
			dirs = append(dirs, filepath.Base(filepath.Dir(path)))
		}
	}
	require.Greater(t, len(dirs), 10)
	return append(dirs, "harness")
}

// sources calls do for each file of the end-to-end tests, with its directory and name.
func sources(t *testing.T, do func(name string, file *ast.File)) {
	t.Helper()
	for _, dir := range endToEnd(t) {
		paths, err := filepath.Glob(filepath.Join("..", dir, "*.go"))
		require.NoError(t, err)
		for _, path := range paths {
			if dir == "harness" && strings.HasSuffix(path, "_test.go") {
				continue // they start nothing
			}
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
			require.NoError(t, err)
			do(filepath.Join(dir, filepath.Base(path)), file)
		}
	}
}

// A test waits by harness.Await with law 13's bound (Eventually), by a method of scenario.Tenant, which has it too, or
// in a way that is listed with its own bound and the reason.
func TestLaw13EveryWaitOfAnEndToEndTestIsBounded(t *testing.T) {
	found := map[string]bool{}
	sources(t, func(name string, file *ast.File) {
		for _, wait := range waitsOf(file) {
			found[name+" "+wait] = true
		}
	})
	var listed []string
	for _, waits := range otherBounds() {
		listed = append(listed, waits...)
	}
	require.ElementsMatch(t, listed, slices.Collect(maps.Keys(found)),
		"use Eventually, or list the wait with its bound and the reason")
}

// Each agent is started by Testbed.StartAgent, which has it audited, or in a place that is listed with the reason.
func TestLaw13EveryNodeOfAnEndToEndTestIsAudited(t *testing.T) {
	const again = "starts an audited agent again"
	listed := map[string]string{
		"billing/node_disk_test.go TestLaw05AClonedNodeIsQuarantinedAndBilledOnce":    "has the clone audited",
		"chaos/storm_test.go agentTarget":                                             again,
		"cli/preflight_test.go TestTheAgentReportsMisconfigurationsAndChangesNothing": "runs no workload",
		"guide/guide_test.go startNode":                                               "newGuideRun has it audited",
		"harness/testbed.go StartAgent":                                               "it is what has agents audited",
		"security/altered_test.go observesOrEnds":                                     again,
	}
	var found []string
	sources(t, func(name string, file *ast.File) {
		for _, d := range file.Decls {
			f, is := d.(*ast.FuncDecl)
			if !is {
				continue
			}
			ast.Inspect(f, func(n ast.Node) bool {
				if s, is := n.(*ast.SelectorExpr); is && s.Sel.Name == "StartAgent" && nameOf(s.X) == "devcluster" {
					found = append(found, name+" "+f.Name.Name)
				}
				return true
			})
		}
	})
	require.ElementsMatch(t, slices.Collect(maps.Keys(listed)), found)
}

func TestWaitsAreFound(t *testing.T) {
	for text, want := range map[string]string{
		`require.Eventually(t, there, time.Hour, time.Second)`:              "require.Eventually",
		`for !there() { time.Sleep(time.Second) }`:                          "time.Sleep",
		`for { select { case <-time.After(time.Second): } }`:                "time.After",
		`w.Operator.WaitInstance(w.Ctx, project, id, status, nil)`:          "WaitInstance",
		`do(context.Background())`:                                          "context.Background",
		`ctx, cancel := context.WithTimeout(w.Ctx, stepLimit)`:              "context.WithTimeout stepLimit",
		`ctx, cancel := context.WithTimeout(w.Ctx, 3*time.Hour)`:            "context.WithTimeout expression",
		`harness.Await(w.Ctx, time.Hour, there)`:                            "harness.Await Hour",
		`harness.Await(w.Ctx, harness.ConvergenceBound, there)`:             "",
		`ctx, cancel := context.WithTimeout(w.Ctx, ConvergenceBound)`:       "",
		`w.Eventually("it is there", there); w.Tenant.Launch(w.Ctx, in, f)`: "",
	} {
		file, err := parser.ParseFile(token.NewFileSet(), "x.go", "package x\nfunc F() { "+text+" }", 0)
		require.NoError(t, err)
		found := waitsOf(file)
		if want == "" {
			require.Empty(t, found, text)
			continue
		}
		require.Equal(t, []string{"F: " + want}, found, text)
	}
}
