package cli

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/appkit"
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/protocol"
)

func artifactColumns() []column[client.Artifact] {
	return []column[client.Artifact]{
		{"REPOSITORY", func(t client.Artifact) string { return t.Repository }},
		{"DIGEST", func(t client.Artifact) string { return t.Digest }},
		{"APP", func(t client.Artifact) string { return t.AppSlug + " " + t.AppVersion }},
		{"STATUS", func(t client.Artifact) string { return string(t.Status) }},
		{"TRUST", func(t client.Artifact) string { return string(t.TrustState) }},
		{"CHANNEL", func(t client.Artifact) string { return string(t.Channel) }},
		{"ID", func(t client.Artifact) string { return t.ID }},
	}
}

func (a *app) artifactsCommand() *cobra.Command {
	var slug string
	list := projectListing(a, "list", "Artifacts of the project", cobra.NoArgs, artifactColumns(),
		func(ctx context.Context, s *session, project string, _ []string, cursor string) (*http.Response, error) {
			return s.hub.ListArtifacts(ctx, project,
				&client.ListArtifactsParams{Cursor: cursor, Limit: client.PageSize, AppSlug: slug}, s.editors()...)
		})
	list.Flags().StringVar(&slug, "app", "", "only of this app")
	return group("artifacts", "Images of an app", list, a.pushCommand(),
		a.projectAction("get ARTIFACT_ID", "One artifact", cobra.ExactArgs(1), func(ctx context.Context, s *session,
			project string, args []string,
		) error {
			return showAnswer(s, artifactColumns())(s.hub.GetArtifact(ctx, project, args[0], nil, s.editors()...))
		}),
		a.projectAction("verify ARTIFACT_ID", "Read the signatures of an artifact once more", cobra.ExactArgs(1),
			func(ctx context.Context, s *session, project string, args []string) error {
				return showAnswer(s, artifactColumns())(s.hub.VerifyArtifact(ctx, project, args[0], s.editors()...))
			}),
		a.promoteArtifactCommand(),
		a.withdrawCommand("deprecate", "Close an artifact for further versions", (*client.Hub).DeprecateArtifact),
		a.withdrawCommand("retire", "End an artifact that nothing uses; its content leaves the registry",
			(*client.Hub).RetireArtifact),
		a.withdrawCommand("revoke", "End the trust in an artifact's content; nothing starts with it any more",
			(*client.Hub).RevokeArtifact))
}

func (a *app) promoteArtifactCommand() *cobra.Command {
	var channel, reason string
	c := a.projectAction("promote ARTIFACT_ID", "Move a verified artifact to a later channel", cobra.ExactArgs(1),
		func(ctx context.Context, s *session, project string, args []string) error {
			body := client.ArtifactPromote{Channel: client.Channel(channel), Reason: reason}
			return showAnswer(s, artifactColumns())(s.hub.PromoteArtifact(ctx, project, args[0], body, s.editors()...))
		})
	c.Flags().StringVar(&channel, "to", "", "stage or prod")
	c.Flags().StringVar(&reason, "reason", "", "why")
	_ = c.MarkFlagRequired("to") // exists
	return c
}

func (a *app) withdrawCommand(verb, short string, call func(hub *client.Hub, ctx context.Context, project, id string,
	body client.ArtifactWithdraw, editors ...client.RequestEditorFn) (*http.Response, error),
) *cobra.Command {
	var reason string
	c := a.projectAction(verb+" ARTIFACT_ID", short, cobra.ExactArgs(1), func(ctx context.Context, s *session,
		project string, args []string,
	) error {
		body := client.ArtifactWithdraw{Reason: reason}
		return showAnswer(s, artifactColumns())(call(s.hub, ctx, project, args[0], body, s.editors()...))
	})
	c.Flags().StringVar(&reason, "reason", "", "why")
	_ = c.MarkFlagRequired("reason") // exists
	return c
}

func (a *app) pushCommand() *cobra.Command {
	intent := client.PublishIntentCreate{ArtifactName: "runtime"}
	var keyFile, channel string
	c := a.action("push APP VERSION IMAGE", "Push an image, sign it and register its digest", cobra.ExactArgs(3),
		func(ctx context.Context, s *session, args []string) error {
			key, err := publisherKey(keyFile)
			if err != nil {
				return err
			}
			image, err := openImage(args[2])
			if err != nil {
				return err
			}
			intent.AppSlug, intent.AppVersion, intent.Channel, intent.ArtifactKind = args[0], args[1], client.Channel(channel),
				client.ArtifactKindOci
			project, err := s.projectID(ctx)
			if err != nil {
				return err
			}
			artifact, err := s.push(ctx, project, intent, image, key)
			if err != nil {
				return err
			}
			return show(s, artifact, artifactColumns())
		})
	c.Long = `Push an image, sign it and register its digest.

IMAGE is a file that "docker save" would write, or the directory of an OCI layout with one image.
The publisher's key signs in cosign's form; the manifest then names the image as REPOSITORY@DIGEST.`
	f := c.Flags()
	f.StringVar(&intent.ArtifactName, "name", intent.ArtifactName, "name of the artifact within the app")
	f.StringVar(&channel, "channel", string(client.ChannelDev), "dev, stage or prod")
	f.StringVar(&keyFile, "key", "", "publisher's private key (PEM)")
	return c
}

// push goes the way of every publisher: intent, registry with signature, registration.
func (s *session) push(ctx context.Context, project string, want client.PublishIntentCreate, image v1.Image,
	signer protocol.Signer,
) (client.Artifact, error) {
	intent, err := s.publishIntent(ctx, project, want)
	if err != nil {
		return client.Artifact{}, err
	}
	target := appkit.Target{
		RegistryHost: intent.RegistryHost, Repository: intent.Repository, Tag: intent.Tag, CAPEM: s.conf.CAPEM,
		Username: intent.Credentials.Username, Password: intent.Credentials.Password,
	}
	pushed, err := appkit.Push(ctx, image, target, signer, func(done, total int64) {
		s.progress.now(fmt.Sprintf("pushing the image, %d of %d MiB", done>>20, total>>20))
	})
	if err != nil {
		return client.Artifact{}, err
	}
	return client.Read[client.Artifact](s.hub.RegisterArtifact(ctx, project, client.ArtifactRegister{
		AppSlug: want.AppSlug, AppVersion: want.AppVersion, ArtifactName: want.ArtifactName,
		ArtifactKind: client.ArtifactKindOci,
		Repository:   pushed.Repository, Digest: pushed.Digest, Tag: intent.Tag, MediaType: pushed.MediaType,
		Channel: want.Channel,
	}, s.editors()...))
}

// publishIntent asks for an intent, once for all repetitions of the command. The credentials of one that was given for
// an earlier repetition may have ended; then another one is asked for.
func (s *session) publishIntent(ctx context.Context, project string, want client.PublishIntentCreate,
) (client.PublishIntent, error) {
	intent, err := client.Read[client.PublishIntent](s.hub.CreatePublishIntent(ctx, project, want, s.editors()...))
	if err != nil || time.Now().Before(intent.Credentials.ExpiresAt) {
		return intent, err
	}
	return client.Read[client.PublishIntent](s.hub.CreatePublishIntent(ctx, project, want))
}

// openImage reads a docker-save file or an OCI layout.
func openImage(path string) (v1.Image, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, usage(err)
	}
	if !info.IsDir() {
		image, err := tarball.ImageFromPath(path, nil)
		if err != nil {
			return nil, usage(fmt.Errorf("%s is not an image as docker save writes it: %w", path, err))
		}
		return image, nil
	}
	index, err := layout.ImageIndexFromPath(path)
	if err != nil {
		return nil, usage(fmt.Errorf("%s is not an OCI layout: %w", path, err))
	}
	list, err := index.IndexManifest()
	if err != nil {
		return nil, usage(fmt.Errorf("%s is not an OCI layout: %w", path, err))
	}
	if len(list.Manifests) != 1 {
		return nil, usage(fmt.Errorf("%s holds %d images instead of one", path, len(list.Manifests)))
	}
	return index.Image(list.Manifests[0].Digest)
}
