package notebook_test

import (
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/deploy/apps/jupyter"
	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/pkg/execstream"
)

// python runs a program in an instance by its own interpreter, and returns what it prints.
func python(w *harness.Testbed, i client.AppInstance, program string) (out string, code int) {
	w.T.Helper()
	s, err := w.Operator.Exec(w.Ctx, i.ProjectID, i.ID, client.AppInstanceExec{
		Service: "main", Command: []string{"python3", "-c", program},
	})
	require.NoError(w.T, err)
	for {
		kind, payload, err := execstream.Receive(s)
		require.NoError(w.T, err)
		switch kind {
		case execstream.Stdout, execstream.Stderr:
			out += string(payload)
		case execstream.Exit:
			code, _ = execstream.DecodeExit(payload)
			return out, code
		default:
			w.T.Fatalf("frame %d: %s", kind, payload)
		}
	}
}

// shipJupyter ships Jupyter as an app of the tenant under this slug.
func shipJupyter(w *harness.Testbed, slug string) {
	w.T.Helper()
	publisher, err := w.Tenant.NewPublisher(w.Ctx)
	require.NoError(w.T, err)
	shipVersion(w, publisher, slug, "1.0.0")
	require.NoError(w.T, w.Tenant.Entitle(w.Ctx, slug))
	require.NoError(w.T, w.Tenant.Price(w.Ctx, slug, "0.01"))
}

// shipVersion ships a version of Jupyter with changes of the manifest.
func shipVersion(w *harness.Testbed, publisher *scenario.Publisher, slug, version string, changes ...string) {
	w.T.Helper()
	changes = append(changes, "slug: jupyter", "slug: "+slug, "max_size_mib: 8192", "max_size_mib: 128")
	_, err := w.Tenant.Ship(w.Ctx, publisher, scenario.Release{
		AppSlug: slug, Version: version, Image: w.JupyterImage(),
		Template: harness.Edited(w.T, jupyter.Template(), changes...),
	})
	require.NoError(w.T, err)
}

const password = "password"

func jupyterRequest(w *harness.Testbed, slug, name string, requirements ...string) client.AppInstanceCreate {
	return client.AppInstanceCreate{
		AppSlug: slug, Version: "1.0.0", DisplayName: name,
		Environment: client.EnvironmentChoice{Requirements: requirements},
		Resources:   client.InstanceResources{CPUMillis: 500},
		Volumes:     client.VolumeChoices{{Name: "home", SizeMib: 64}},
		Parameters: map[string]any{
			"password_hash": jupyter.HashPassword(password, hex.EncodeToString(make([]byte, 8))),
		},
		PlacementIntent: client.PlacementIntent{AllocationIds: []string{w.Allocation.ID}},
	}
}

func launchJupyter(w *harness.Testbed, slug, name string, requirements ...string) (client.AppInstance, error) {
	w.T.Helper()
	i, _, err := w.Tenant.Launch(w.Ctx, w.Operator, jupyterRequest(w, slug, name, requirements...), nil)
	return i, err
}

func environments(w *harness.Testbed) []client.Environment {
	w.T.Helper()
	list, err := client.Read[client.EnvironmentList](w.Operator.ListEnvironments(w.Ctx, w.Tenant.Project.ID,
		&client.ListEnvironmentsParams{}))
	require.NoError(w.T, err)
	return list.Items
}

func deleteEnvironment(w *harness.Testbed, e client.Environment) error {
	res, err := w.Operator.DeleteEnvironment(w.Ctx, w.Tenant.Project.ID, e.Digest, e.NodeID)
	if err == nil {
		err = res.Body.Close()
	}
	return err
}

// notebooks is a node that may reach a package index of the test, and a tenant with Jupyter and room for two instances.
func notebooks(t *testing.T, private bool) (*harness.Testbed, *packageIndex) {
	t.Helper()
	w := harness.New(t)
	w.StartContainerd()
	w.StartHub(w.HubConfig())
	index, args := indexIn(w, private)
	node := w.AgentConfig("node")
	node.ExtraArgs = append(node.ExtraArgs, args...)
	w.NewTenant("acme")
	w.Agent = w.StartAgent(node)
	shipJupyter(w, "jupyter")
	allocateTwo(w)
	putIndex(w, index)
	return w, index
}

func allocateTwo(w *harness.Testbed) {
	w.T.Helper()
	var err error
	w.Allocation, err = w.Tenant.Allocate(w.Ctx, w.Tenant.Admin, w.Agent.Ready.NodeID, 1, 1024)
	require.NoError(w.T, err)
}

// indexIn serves a package index in a network of its own. args let a node's containers reach it.
func indexIn(w *harness.Testbed, private bool) (index *packageIndex, args []string) {
	w.T.Helper()
	network := w.NewNetwork("index")
	address := network.Address("index") + ":8000"
	index = newPackageIndex(w.T, network.Path("index"), address, private, map[string]string{
		"greetpack": "good morning",
	})
	policy := filepath.Join(w.Dir, "policy.yaml")
	require.NoError(w.T, os.WriteFile(policy, []byte("egress: {allow: ['"+address+"']}\n"), 0o600))
	return index, []string{"--policy", policy}
}

func putIndex(w *harness.Testbed, index *packageIndex) {
	w.T.Helper()
	body := client.PackageIndexPut{URL: index.url, CaPem: index.ca}
	if index.ca != "" {
		body.Username, body.Password = indexUser, indexPassword
	}
	kept, err := client.Read[client.PackageIndex](w.Operator.PutPackageIndex(w.Ctx, w.Tenant.Project.ID, body))
	require.NoError(w.T, err)
	require.Equal(w.T, index.ca != "", kept.OwnCa)
}

func requireGreeting(w *harness.Testbed, i client.AppInstance) {
	w.T.Helper()
	out, code := python(w, i, "import greetpack; print(greetpack.text)")
	require.Zero(w.T, code, out)
	require.Equal(w.T, "good morning\n", out)
}

// A notebook imports a package that its image does not have; the next one finds it installed. The index is the
// project's own: it has a password, and a certificate that the image does not trust.
func TestJupyterImportsThePackagesOfItsEnvironment(t *testing.T) {
	w, index := notebooks(t, true)
	first, err := launchJupyter(w, "jupyter", "first", "Greetpack>=1")
	require.NoError(t, err)
	require.Equal(t, []string{"greetpack>=1"}, first.Environment.Requirements)
	requireGreeting(w, first)
	out, code := python(w, first, "open('/opt/environment/x', 'w')")
	require.NotZero(t, code)
	require.Contains(t, out, "Read-only file system")
	asked := index.requests.Load()
	require.Positive(t, asked)

	second, err := launchJupyter(w, "jupyter", "second", "greetpack >= 1")
	require.NoError(t, err)
	requireGreeting(w, second)
	require.Equal(t, asked, index.requests.Load(), "nothing is installed again")
	var kept client.Environment
	w.Eventually("the environment is listed with both instances", func() error {
		list := environments(w)
		if len(list) == 1 {
			kept = list[0]
		}
		return harness.Pending(nil, len(list) == 1 && len(kept.UsedBy) == 2)
	})
	require.Equal(t, []string{"greetpack>=1"}, kept.Requirements)
	require.Positive(t, kept.SizeBytes)
	requireProblem(t, deleteEnvironment(w, kept), "environment_in_use")

	// A package that the index does not have is a clear status, and changes nothing for the others.
	w.Decommission(second)
	failed, err := launchJupyter(w, "jupyter", "failed", "absentpack")
	require.Error(t, err)
	failed = w.Instance(failed.ID)
	require.Equal(t, client.AppInstanceStatusFailed, failed.Status)
	require.Equal(t, client.StatusReasonEnvironmentFailed, failed.StatusReason)
	require.Contains(t, failed.Members[0].Detail, "No matching distribution found for absentpack")
	require.NotContains(t, failed.Members[0].Detail, indexPassword)
	w.Decommission(failed)
	requireGreeting(w, first)
	w.Decommission(first)
}

// An environment stays for the next instance of its project, and is no other org's.
func TestAnEnvironmentIsOfOneOrgUntilItIsDeleted(t *testing.T) {
	w, index := notebooks(t, false)
	first, err := launchJupyter(w, "jupyter", "first", "greetpack>=1")
	require.NoError(t, err)
	w.Decommission(first)
	w.Eventually("the environment is unused and stays", func() error {
		list := environments(w)
		return harness.Pending(nil, len(list) == 1 && len(list[0].UsedBy) == 0)
	})
	kept, asked := environments(w)[0], index.requests.Load()
	tenant, operator := w.Tenant, w.Operator
	_, err = client.Read[client.Allocation](tenant.Admin.ReleaseAllocation(w.Ctx, tenant.Project.ID, w.Allocation.ID))
	require.NoError(t, err)
	w.Eventually("the room of the first org is free", func() error {
		a, err := client.Read[client.Allocation](tenant.Admin.GetAllocation(w.Ctx, tenant.Project.ID, w.Allocation.ID))
		return harness.Pending(err, a.Status == client.AllocationStatusReleased)
	})

	w.NewTenant("rival")
	shipJupyter(w, "notebook")
	allocateTwo(w)
	putIndex(w, index)
	require.Empty(t, environments(w))
	requireProblem(t, deleteEnvironment(w, kept), "not_found")
	theirs, err := launchJupyter(w, "notebook", "theirs", "greetpack>=1")
	require.NoError(t, err)
	require.Greater(t, index.requests.Load(), asked, "another org installs its own")
	w.Decommission(theirs)

	w.Tenant, w.Operator = tenant, operator
	require.NoError(t, deleteEnvironment(w, kept))
	require.Empty(t, environments(w))
	found, err := filepath.Glob(filepath.Join(w.Agent.Config.DataDir(), "environments", tenant.Project.ID+".*"))
	require.NoError(t, err)
	require.Empty(t, found)
}

func requireProblem(t *testing.T, err error, code string) {
	t.Helper()
	problem, is := errors.AsType[*client.Problem](err)
	require.True(t, is, "%v", err)
	require.Equal(t, client.ProblemCode(code), problem.Code)
}
