package failpoint_test

import (
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/failpoint"
)

// Every name is passed at one place of the code, and every place has a name of the list.
func TestEachPointIsListedAndStandsAtOnePlace(t *testing.T) {
	places := map[string][]string{}
	for _, room := range []string{"agent", "hub", "pkg", "protocol"} {
		root := filepath.Join("..", "..", room)
		require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case d.IsDir() && d.Name() == "testdata":
				return fs.SkipDir
			case strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go"):
				collect(t, path, places)
			}
			return nil
		}))
	}
	listed := map[string]bool{}
	for _, name := range failpoint.Names() {
		require.False(t, listed[name], "%s is listed twice", name)
		listed[name] = true
		require.Regexp(t, `^(agent|hub)(/[a-z_]+){2}$`, name)
		require.Len(t, places[name], 1, "%s stands at %v", name, places[name])
	}
	for name, at := range places {
		require.True(t, listed[name], "%s at %v is not listed", name, at)
	}
}

// collect notes where a file calls failpoint.Hit.
func collect(t *testing.T, path string, places map[string][]string) {
	t.Helper()
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, path, nil, parser.SkipObjectResolution)
	require.NoError(t, err)
	ast.Inspect(file, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		f, ok := call.Fun.(*ast.SelectorExpr)
		if !ok || f.Sel.Name != "Hit" {
			return true
		}
		if room, ok := f.X.(*ast.Ident); !ok || room.Name != "failpoint" {
			return true
		}
		at := files.Position(call.Pos()).String()
		literal, ok := call.Args[0].(*ast.BasicLit)
		require.True(t, ok, "%s: the name must be a literal", at)
		name, err := strconv.Unquote(literal.Value)
		require.NoError(t, err)
		places[name] = append(places[name], at)
		return true
	})
}

// The program dies at the hit that was asked for, by a signal that nothing of it survives, and is disarmed by that.
func TestAProgramBuiltWithTheTagDiesAtTheArmedHit(t *testing.T) {
	dir := t.TempDir()
	armed := filepath.Join(dir, "armed")
	walk := func(tags string) (string, error) {
		bin := filepath.Join(dir, "walker"+tags)
		build := exec.Command("go", "build", "-tags", tags, "-o", bin, "./testdata/walker")
		text, err := build.CombinedOutput()
		require.NoError(t, err, "%s", text)
		cmd := exec.Command(bin)
		cmd.Env = append(os.Environ(), "GPUAAS_FAILPOINT="+armed)
		out, err := cmd.Output()
		return string(out), err
	}
	const whole = "1\n2\n3\ndeferred\n"

	out, err := walk("failpoint")
	require.NoError(t, err)
	require.Equal(t, whole, out, "not armed")
	require.NoError(t, os.WriteFile(armed, []byte("walker/other 1"), 0o600))
	out, err = walk("failpoint")
	require.NoError(t, err)
	require.Equal(t, whole, out, "another point is armed")

	require.NoError(t, os.WriteFile(armed, []byte("walker/step 2"), 0o600))
	out, err = walk("")
	require.NoError(t, err)
	require.Equal(t, whole, out, "not built with the tag")
	out, err = walk("failpoint")
	exit, ok := errors.AsType[*exec.ExitError](err)
	require.True(t, ok, "%v", err)
	status, ok := exit.Sys().(syscall.WaitStatus)
	require.True(t, ok)
	require.Equal(t, syscall.SIGKILL, status.Signal())
	require.Equal(t, "1\n", out)
	require.NoFileExists(t, armed)
	reached, err := os.ReadFile(armed + ".reached")
	require.NoError(t, err)
	require.Equal(t, "walker/step 2", string(reached))
	out, err = walk("failpoint")
	require.NoError(t, err)
	require.Equal(t, whole, out, "disarmed by its death")
}
